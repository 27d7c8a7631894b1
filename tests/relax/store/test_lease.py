"""Who holds a run: the living, the dead, other hosts, and races for a stale lease."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from store_cases import names

from relax.errors import ConfigError
from relax.store import lease as leases
from relax.store.lease import Lease, identity, start_time


def held_by(root, **changes) -> dict:
    """Write a lease as `identity` would be with `changes`."""
    holder = {**identity(), **changes}
    (root / "lease").mkdir(parents=True, exist_ok=True)
    last_file(root).write_text(json.dumps(holder))
    return holder


def last_file(root):
    return max((root / "lease").glob("*.json"), default=root / "lease/000001.json")


@pytest.fixture
def other_process():
    process = subprocess.Popen(["sleep", "600"])
    yield {"pid": process.pid, "start": start_time(process.pid)}
    process.kill()
    process.wait()


def test_a_lease_is_held_and_given_back(tmp_path):
    with Lease(tmp_path / "run") as lease:
        assert names(tmp_path / "run/lease") == ["000001.json"]
        assert json.loads(lease.path.read_text()) == identity()
        lease.check()
    assert lease.path.read_text() == ""


def test_a_living_holder_is_named(tmp_path, other_process):
    holder = held_by(tmp_path, **other_process)
    said = f"in use by process {holder['pid']} on {holder['host']}; wait for it, stop it, or give"
    with pytest.raises(ConfigError, match=said), Lease(tmp_path):
        pass
    assert json.loads(last_file(tmp_path).read_text()) == holder


def test_this_process_cannot_hold_it_twice(tmp_path):
    said = f"in use by process {os.getpid()}"
    with Lease(tmp_path), pytest.raises(ConfigError, match=said), Lease(tmp_path):
        pass


def dead(other_process):
    return [
        {"pid": 2**22 + 1, "start": 1},
        {**other_process, "start": other_process["start"] - 1},
        {**other_process, "boot": "an earlier one"},
    ]


def test_a_dead_holder_is_replaced(tmp_path, other_process):
    """Gone, its number given to another process, or from before the machine was restarted."""
    for holder in dead(other_process):
        held_by(tmp_path, **holder)
        with Lease(tmp_path) as lease:
            lease.check()
            assert names(tmp_path / "lease") == [lease.path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', "null"])
def test_a_damaged_lease_is_replaced(tmp_path, text):
    (tmp_path / "lease").mkdir()
    last_file(tmp_path).write_text(text)
    with Lease(tmp_path) as lease:
        lease.check()


def test_another_host_is_judged_by_its_silence(tmp_path):
    holder = held_by(tmp_path, host="far-away", pid=7)
    with pytest.raises(ConfigError, match="in use by process 7 on far-away"), Lease(tmp_path):
        pass
    path = last_file(tmp_path)
    last_beat = path.stat().st_mtime - leases.STALE_S - 1
    os.utime(path, (last_beat, last_beat))
    with Lease(tmp_path) as lease:
        assert json.loads(last_file(tmp_path).read_text()) == lease.me != holder


def test_the_beat_keeps_the_lease_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.001)
    with Lease(tmp_path) as lease:
        os.utime(lease.path, (0, 0))
        deadline = time.monotonic() + 60
        while lease.path.stat().st_mtime == 0:
            assert time.monotonic() < deadline


def test_a_beat_that_fails_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.001)
    tried = []
    enough = threading.Event()

    def refuse(path):
        tried.append(path)
        if len(tried) == 3:
            enough.set()
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(leases.os, "utime", refuse)
    with Lease(tmp_path):
        assert enough.wait(60)


def test_who_was_replaced_is_told_by_whom(tmp_path):
    with Lease(tmp_path) as lease:
        held_by(tmp_path, host="far-away", pid=7)
        said = "taken over by process 7 on far-away; this flow ends here"
        with pytest.raises(ConfigError, match=said):
            lease.check()
    assert json.loads(last_file(tmp_path).read_text())["host"] == "far-away"


def test_a_lease_that_was_deleted_by_hand_ends_the_flow(tmp_path):
    """Its owner wanted the run free: what comes next must not meet two flows."""
    with Lease(tmp_path) as lease:
        shutil.rmtree(lease.directory)
        with pytest.raises(ConfigError, match="taken over by someone; this flow ends here"):
            lease.check()


def test_who_comes_late_with_an_old_finding_changes_nothing(tmp_path, monkeypatch):
    """It found a lease stale; before it acts, another takes the run and removes that lease."""
    held_by(tmp_path, pid=2**22 + 1)
    late, link, fast = Lease(tmp_path), os.link, []
    late.me = {**late.me, "pid": 7}

    def slow(source, target):
        monkeypatch.undo()
        with Lease(tmp_path):
            pass
        fast.append(Lease(tmp_path).__enter__())
        fast[0].check()
        link(source, target)

    monkeypatch.setattr(leases.os, "link", slow)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        late.__enter__()
    assert late.number == 2 and fast[0].number == 3
    fast[0].check()
    assert names(tmp_path / "lease") == ["000003.json"]
    fast[0].__exit__()


def test_numbers_only_grow(tmp_path):
    for number in (1, 2, 3):
        with Lease(tmp_path) as lease:
            assert lease.number == number
        assert names(tmp_path / "lease") == [f"{number:06d}.json"]
        assert lease.path.read_text() == ""


def test_a_link_that_worked_and_was_refused_counts(tmp_path, monkeypatch):
    """As over NFS, when the answer is lost and the question repeated."""
    link, refused = os.link, []

    def repeated(source, target):
        link(source, target)
        refused.append(target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(leases.os, "link", repeated)
    with Lease(tmp_path) as lease:
        assert refused == [lease.path]
        lease.check()
    assert names(tmp_path / "lease") == [lease.path.name]


TAKER = """
import sys
from pathlib import Path
from relax.errors import ConfigError
from relax.store.lease import Lease
root, ready = Path(sys.argv[1]), Path(sys.argv[2])
ready.touch()
while not (ready.parent / "go").exists():
    pass
try:
    with Lease(root) as lease:
        lease.check()
        print("holds", flush=True)
        sys.stdin.readline()
        lease.check()
except ConfigError as error:
    print(error, flush=True)
"""


@pytest.mark.integration
def test_of_many_that_find_a_stale_lease_one_holds_the_run(tmp_path):
    root = tmp_path / "run"
    held_by(root, pid=2**22 + 1)
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(root), str(tmp_path / f"ready-{i}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(takers):
        assert all(taker.poll() is None for taker in takers)
    (tmp_path / "go").touch()
    said = [taker.stdout.readline().strip() for taker in takers]
    later = [taker.communicate("\n", timeout=60)[0] for taker in takers]
    assert said.count("holds") == 1
    holder = takers[said.index("holds")].pid
    assert all(f"in use by process {holder} on" in line for line in said if line != "holds")
    assert later == ["", "", "", ""]
