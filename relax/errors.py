"""Errors that are the user's to mend: one line that says where, what, the value and what to do."""


class ConfigError(ValueError):
    """A setting, flag or input file that cannot be used."""


class TrainingError(ValueError):
    """Training that cannot go on: what happened, at which step, and what was kept of it."""


class ArtifactError(ValueError):
    """A file of a run, a model or a data set that is damaged, foreign, stale or missing."""
