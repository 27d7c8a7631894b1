"""Errors that are the user's to mend: one line that says where, what, the value and what to do."""


def one_line(error: BaseException) -> str:
    """Give an error's text on one line."""
    return " ".join(str(error).split())


class ConfigError(ValueError):
    """A setting, flag or input file that cannot be used."""


class FunctionError(ValueError):
    """A function of the user's own that failed: one line, then the function's own frames."""

    def __init__(self, line: str, frames: str = "") -> None:
        super().__init__(line, frames)
        self.line, self.frames = line, frames

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.line, self.frames)))

    def at(self, place: str) -> "FunctionError":
        """The same error, with what it was called for."""
        return FunctionError(f"{self.line}, {place}", self.frames)


class TrainingError(ValueError):
    """Training that cannot go on: what happened, at which step, and what was kept of it."""


class ArtifactError(ValueError):
    """A file of a run, a model or a data set that is damaged, foreign, stale or missing."""
