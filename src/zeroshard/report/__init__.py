"""Reports: one run folder in, one self-contained `report.html` out, with the charting library inside.

Read `run_records` and `run_folder` (the files of a run), `page` (the report), then its charts and tables. Only the
timelines of schedules and of offload are drawn here; Plotly draws the rest, in `charts.js`.
"""

from zeroshard.report.page import write_report

__all__ = ["write_report"]
