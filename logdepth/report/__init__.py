"""Tables, figures and a page, from result files alone."""

from logdepth.report.write import write_report

__all__ = ["write_report"]
