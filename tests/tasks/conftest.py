"""A session without a cluster, and what it would submit."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from job_lab import recorded, session_in

from slurm import records
from slurm.watch import Seen
from tasks import claims


@pytest.fixture
def session(tmp_path):
    return session_in(tmp_path)


@pytest.fixture
def submitted(session, monkeypatch):
    """What would have been submitted; each gets the next job id."""
    orders = []

    def submit(folder, order):
        orders.append(order)
        job_id = str(100 + len(orders))
        session.answers[job_id] = Seen("RUNNING")
        return recorded(folder, job_id)

    monkeypatch.setattr(claims, "submit", submit)
    return orders


@pytest.fixture
def sleepers():
    """Two processes, and what the record of a local array says of them."""
    made = [subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(2)]
    starts = [records.process_start(process.pid) for process in made]
    yield made, {"job_id": ",".join(str(process.pid) for process in made), "start": starts}
    for process in made:
        process.kill()
        process.wait()
