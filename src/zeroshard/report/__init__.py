"""Reports: one run folder in, one self-contained `report.html` out: no network, no plotting library.

Read `run_folder` (the files of a run), `page` (the report), then the figures and tables that it is made of.
"""

from zeroshard.report.page import write_report

__all__ = ["write_report"]
