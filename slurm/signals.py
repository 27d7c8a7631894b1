"""USR2 asks a job to stop soon (preemption, time limit): a flag, read where work may be left."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_asked = False


def listen() -> None:
    """Replace submitit's handlers, which act on rank 0 only and raise at any bytecode.

    USR2 sets the flag; TERM ends the process as it does any other: nothing committed is lost.
    SLURM sends USR2 to every process of the job. What this one starts (engines, sandboxes)
    inherits that it is blocked, and is not ended by it; here a thread waits for it.
    """
    signal.signal(signal.SIGUSR2, _ask)  # where a thread that began earlier takes it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    threading.Thread(target=_wait, name="USR2", daemon=True).start()


def asked() -> bool:
    """Whether this process was asked to stop."""
    return _asked


def _wait() -> None:
    while True:
        _ask(signal.sigwait({signal.SIGUSR2}))


def _ask(number: int, frame: FrameType | None = None) -> None:
    del number, frame
    global _asked  # noqa: PLW0603  a signal handler has nowhere else to leave word
    _asked = True
    print("asked to stop: the rest is left at the next boundary", flush=True)
