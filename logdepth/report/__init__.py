"""Tables, figures and a page, from result files alone."""

from logdepth.report.write import Report, write_report, write_what_can_be

__all__ = ["Report", "write_report", "write_what_can_be"]
