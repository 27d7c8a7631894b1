"""A job's logs, read as they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


class LogReader:
    """Gives each line of some files once, when it is whole; `files` finds those there are."""

    def __init__(self, files: Callable[[], Iterable[Path]]) -> None:
        self._files = files
        self._places: dict[Path, int] = {}

    def lines(self) -> list[str]:
        """The lines that were finished since the last call."""
        return [line for path in self._files() for line in self._new(path)]

    def _new(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                new = file.read()
        except FileNotFoundError:  # packed away since it was found
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._places[path] = self._places.get(path, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()
