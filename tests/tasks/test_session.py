"""What a flow checks between two stages."""

import json

import pytest

from relax.errors import ConfigError
from relax.flags import load_config
from relax.store import Run, disk
from relax.store.lease import Lease
from tasks import session as sessions
from tasks import stage as stages
from tasks.session import Session, Stopped


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "snapshot", lambda run: tmp_path / "code")
    config = load_config(None, {"run_dir": str(tmp_path), "hf_checkpoint": "x", "min_free_gib": 0})
    with Lease(tmp_path) as lease:
        run = Run.start(config, {}, {"command": "test", "schedule_steps": 1})
        yield Session(config, run, lease, lambda *_: None)


def test_a_flow_that_was_replaced_leaves_at_the_next_stage(session):
    other = {"host": "far-away", "boot": "b", "pid": 7, "start": 1}
    session.lease.path.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="taken over by process 7 on far-away; this flow ends"):
        stages.perform(session, 0, "rollout")
    assert not (session.run.root / "steps").exists()


def test_a_flow_that_was_asked_to_stop_says_how_to_go_on(session):
    session.stopping.set()
    with pytest.raises(Stopped, match="stopped; run the same command again to continue"):
        stages.perform(session, 0, "rollout")


def test_low_space_pauses_with_one_line_until_there_is_more(session, monkeypatch, capsys):
    free = iter([0.5, 0.4, 2.0])
    monkeypatch.setattr(disk, "free_gib", lambda path: next(free))
    monkeypatch.setattr(sessions.time, "sleep", lambda seconds: None)
    session.config = load_config(None, {"min_free_gib": 1.0})
    session.before_stage()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "0.50 GiB free, min_free_gib = 1.0: paused until there is more; Ctrl-C to stop" in said


def test_ctrl_c_during_a_pause_stops(session, monkeypatch):
    monkeypatch.setattr(disk, "free_gib", lambda path: 0.1)
    monkeypatch.setattr(sessions.time, "sleep", lambda seconds: session.stopping.set())
    session.config = load_config(None, {"min_free_gib": 1.0})
    with pytest.raises(Stopped):
        session.before_stage()


def test_no_two_attempts_have_one_name(session):
    assert len({session.attempt() for _ in range(100)}) == 100
