"""Prefect's own temporary server, started where Ctrl-C does not reach it."""

from __future__ import annotations

import functools
import subprocess
import sys
from unittest import mock

from prefect.settings import PREFECT_API_URL

WORDS = (
    "starting a temporary Prefect server (10-30 s; PREFECT_API_URL names a lasting one, "
    "--no-prefect does without)"
)


def ensure_server() -> None:
    """Where no server is named, announce and start a temporary one for this process.

    A terminal sends Ctrl-C to its whole process group; the server gets one of its own, so that
    the flow can still report how it ended.
    """
    if PREFECT_API_URL.value():
        return
    print(WORDS, file=sys.stderr)
    from prefect.server.api import server

    popen = functools.partial(subprocess.Popen, process_group=0)
    with mock.patch(f"{server.__name__}.subprocess.Popen", popen):
        server.SubprocessASGIServer().start()
