"""USR2 asks a job to stop soon (preemption, time limit): a flag, read where work may be left."""

from __future__ import annotations

import signal
from types import FrameType

_asked = False


def listen() -> None:
    """Replace submitit's handlers, which act on rank 0 only and raise at any bytecode.

    USR2 sets the flag; TERM ends the process as it does any other: nothing committed is lost.
    """
    signal.signal(signal.SIGUSR2, _ask)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


def asked() -> bool:
    """Whether this process was asked to stop."""
    return _asked


def _ask(number: int, frame: FrameType | None) -> None:
    del number, frame
    global _asked  # noqa: PLW0603  a signal handler has nowhere else to leave word
    _asked = True
    print("asked to stop: the rest is left at the next boundary", flush=True)
