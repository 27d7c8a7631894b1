"""A session whose cluster says what a test tells it to say, and jobs left by earlier flows."""

import threading
import time
from types import SimpleNamespace

from relax.flags import load_config
from slurm import records
from slurm.jobs import Job
from slurm.watch import Seen, Watch
from tasks.session import Session


class Store:
    """Of a run, what waiting needs: a manifest that appears."""

    def __init__(self, root):
        self.root, self.found = root, None

    def manifest(self, step, stage):
        return self.found


def session_in(root):
    """Without answers the cluster does not answer; what it has no answer about is UNKNOWN."""
    answers = {}
    made = SimpleNamespace(
        config=load_config(None, {"placement": "job", "executor": "slurm"}),
        run=Store(root),
        jobs=root / "jobs",
        code=root / "code",
        plan={},
        making=set(),
        ahead=None,
        lease=SimpleNamespace(check=lambda: None),
        relayed=[],
        stopping=threading.Event(),
        answers=answers,
        watch=Watch(
            lambda ids: {i: answers.get(i, Seen("UNKNOWN")) for i in ids} if answers else None
        ),
        served_jobs=[],
    )
    made.served = made.served_jobs.append
    made.relay = made.relayed.append
    made.stop_if_asked = lambda: Session.stop_if_asked(made)  # type: ignore[arg-type]
    made.cancel_ahead = lambda: Session.cancel_ahead(made)  # type: ignore[arg-type]
    made.jobs.mkdir()
    return made


FACTS = {"step": 3, "executor": "slurm", "elements": 1, "gpus": 0}


def claimed(session, stage="reward", number=1, **more):
    """A folder that this process claimed, and submitted nothing for."""
    folder = session.jobs / f"000003-{stage}-{number}"
    assert records.claim(folder, {**FACTS, "stages": [stage], **more})
    return folder


def recorded(folder, job_id, **more):
    """What a submitter leaves that got the job's id."""
    told = {"job_id": job_id, "start": None, "submitted": time.time()}
    records.write(folder / records.JOB, {**records.read(folder / records.CLAIM), **told, **more})
    return Job.load(folder)


def earlier(session, number=1, job_id="77", **more):
    """The folder of a job that an earlier flow submitted for the reward of step 3."""
    folder = claimed(session, number=number, **more)
    recorded(folder, job_id)
    return folder


def reclaimed(folder, **more):
    """The claim of `folder` as another process would have made it."""
    records.write(folder / records.CLAIM, {**records.read(folder / records.CLAIM), **more})


DEAD = {"start": 1}
"""Of a claim whose process is gone: its pid began at another time."""


def started(folder, state, restart=0, element=None, **more):
    """What rank 0 of a start wrote."""
    place = "" if element is None else f".{element}"
    fact = {"restart": restart, "element": element, "state": state, "started": 1.0, "hosts": []}
    records.write(folder / f"node-{restart}{place}.json", {**fact, "ended": 2.0, **more})


def names(session):
    return sorted(p.name for p in session.jobs.iterdir())


def meanwhile(session, *happens):
    """What happens each time that `obtain` waits; it must not wait more often."""
    left = list(happens)
    session.stopping.wait = lambda seconds: left.pop(0)()
    return left
