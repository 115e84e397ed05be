"""The report: a lake's last days as one HTML page that needs nothing else, and in short for the terminal."""

from dibs.history.report.page import write
from dibs.history.report.short import short
from dibs.history.report.source import Files, Source
from dibs.history.report.summary import Summary, summary

__all__ = ["Files", "Source", "Summary", "short", "summary", "write"]
