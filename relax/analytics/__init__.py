"""Ask a run anything: DuckDB views over its Arrow files."""

from relax.analytics.views import open_run

__all__ = ["open_run"]
