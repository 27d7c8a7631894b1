"""An engine in a process of its own: `python -m relax.stages.serving FD`, started by a pool."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from relax.engines import CONTINUOUS, open_engine
from relax.errors import ArtifactError, ConfigError
from relax.stages.engines import answered
from relax.stages.shard_faults import EngineFault, ShardFailed, brief, is_out_of_memory
from relax.trainer.numerics import make_deterministic

PARENT_EVERY_S = 1.0


def main() -> None:
    """Answer (command, arguments) until the pipe ends: a load once, shards one by one."""
    _end_with_parent()
    pipe = Connection(int(sys.argv[1]))
    name, options, num_threads = pipe.recv()
    if name in CONTINUOUS:  # torch's deterministic mode would refuse operations of theirs
        torch.set_num_threads(num_threads)
    else:
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
                pipe.send(("done", None))
            else:
                assert engine is not None
                for done in answered(engine, *arguments):
                    pipe.send(("done", done))
        except ShardFailed as failed:
            assert isinstance(failed.why, Exception)
            pipe.send(("error", (failed.number, _portable(failed.why))))
        except Exception as error:  # goes to the parent, which raises it
            pipe.send(("error", _portable(error)))
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
