"""What goes wrong with jobs, in one line and the tail of a log."""


class JobError(ValueError):
    """A job that cannot be submitted, died, or ended without what it was for."""
