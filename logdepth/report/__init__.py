"""The report of a study: tables, figures and one HTML page, made only from result files."""

from logdepth.report.tasks import write_task_report
from logdepth.report.write import Report, write_available, write_report

__all__ = ["Report", "write_available", "write_report", "write_task_report"]
