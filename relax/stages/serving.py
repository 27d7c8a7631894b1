"""An engine in a process of its own: `python -m relax.stages.serving FD`, started by a pool."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relax.engines import open_engine
from relax.errors import ArtifactError, ConfigError
from relax.stages.engines import answered
from relax.stages.shard_faults import EngineFault, brief, is_out_of_memory
from relax.trainer.numerics import make_deterministic

PARENT_EVERY_S = 1.0


def main() -> None:
    """Answer (command, arguments) until the pipe ends."""
    _end_with_parent()
    pipe = Connection(int(sys.argv[1]))
    name, options, num_threads = pipe.recv()
    make_deterministic(num_threads)
    engine = None
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if command == "load":
                engine = engine or open_engine(name, **options)
                engine.load(Path(*arguments))
                answer: tuple[str, Any] = ("done", None)
            else:
                assert engine is not None
                answer = ("done", answered(engine, *arguments))
        except Exception as error:  # goes to the parent, which raises it
            answer = ("error", _portable(error))
        pipe.send(answer)
    if engine is not None:
        engine.close()


def _portable(error: Exception) -> Exception:
    """An error that the parent can read: ours as they are, the rest with their traceback."""
    if isinstance(error, ArtifactError | ConfigError):
        error.__cause__ = error.__context__ = None
        return error
    if is_out_of_memory(error):
        return MemoryError(brief(error))
    return EngineFault("".join(traceback.format_exception(error)))


def _end_with_parent() -> None:
    """A killed stage must not leave an engine behind that holds its GPUs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
