"""Tables, figures and a page, from result files alone."""

from logdepth.report.write import write_report, write_tables

__all__ = ["write_report", "write_tables"]
