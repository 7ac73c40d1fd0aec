"""One run folder in, one self-contained ``report.html`` out: no network, no plotting library, no script to serve."""

from zeroshard.report.page import write_report
from zeroshard.report.wording import format_bytes

__all__ = ["format_bytes", "write_report"]
