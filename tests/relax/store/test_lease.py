"""Who holds a run: the living, the dead, other hosts, and races for a stale lease."""

import json
import os
import subprocess
import sys
import threading

import pytest
from store_cases import names

from relax.errors import ConfigError
from relax.store import disk
from relax.store import lease as leases
from relax.store.lease import Lease, identity, start_time


def held_by(root, **changes) -> dict:
    """Write a lease as `identity` would be with `changes`."""
    holder = {**identity(), **changes}
    root.mkdir(exist_ok=True)
    (root / "lease.json").write_text(json.dumps(holder))
    return holder


@pytest.fixture
def other_process():
    process = subprocess.Popen(["sleep", "600"])
    yield {"pid": process.pid, "start": start_time(process.pid)}
    process.kill()
    process.wait()


def test_a_lease_is_held_and_given_back(tmp_path):
    with Lease(tmp_path / "run") as lease:
        assert json.loads((tmp_path / "run" / "lease.json").read_text()) == identity()
        lease.check()
    assert names(tmp_path / "run") == []


def test_a_living_holder_is_named(tmp_path, other_process):
    holder = held_by(tmp_path, **other_process)
    said = f"in use by process {holder['pid']} on {holder['host']}; wait for it, stop it, or give"
    with pytest.raises(ConfigError, match=said), Lease(tmp_path):
        pass
    assert json.loads((tmp_path / "lease.json").read_text()) == holder


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
            assert names(tmp_path) == ["lease.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', "null"])
def test_a_damaged_lease_is_replaced(tmp_path, text):
    (tmp_path / "lease.json").write_text(text)
    with Lease(tmp_path) as lease:
        lease.check()


def test_another_host_is_judged_by_its_silence(tmp_path):
    holder = held_by(tmp_path, host="far-away", pid=7)
    with pytest.raises(ConfigError, match="in use by process 7 on far-away"), Lease(tmp_path):
        pass
    path = tmp_path / "lease.json"
    last_beat = path.stat().st_mtime - leases.STALE_S - 1
    os.utime(path, (last_beat, last_beat))
    with Lease(tmp_path) as lease:
        assert json.loads(path.read_text()) == lease.me != holder


def test_only_the_holder_beats(tmp_path):
    path = tmp_path / "lease.json"
    with Lease(tmp_path) as lease:
        os.utime(path, (0, 0))
        lease._beat_once()
        assert path.stat().st_mtime > 0
        held_by(tmp_path, host="far-away")
        os.utime(path, (0, 0))
        lease._beat_once()
        assert path.stat().st_mtime == 0
    assert json.loads(path.read_text())["host"] == "far-away"


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
    assert names(tmp_path) == ["lease.json"]


STALE = {**identity(), "pid": 2**22 + 1}


def test_a_late_mover_puts_the_lease_back(tmp_path):
    """Two found the same stale lease; the faster one holds the run by now."""
    late = Lease(tmp_path)
    with Lease(tmp_path) as faster:
        late._move_aside(STALE)
        faster.check()
        assert names(tmp_path) == ["lease.json"]


@pytest.fixture
def meanwhile(monkeypatch):
    """Let something happen while a late mover has the lease in its hand."""
    moved = []

    def add(what):
        rename = disk.rename

        def interrupted(source, target):
            rename(source, target)
            if not moved:
                moved.append(target.name)
                what()

        monkeypatch.setattr(disk, "rename", interrupted)
        return moved

    return add


def test_a_holder_whose_lease_a_late_mover_has_in_its_hand_goes_on(tmp_path, meanwhile):
    late = Lease(tmp_path)
    with Lease(tmp_path) as holder:
        moved = meanwhile(holder.check)
        late._move_aside(STALE)
        assert len(moved) == 1
        holder.check()
        assert names(tmp_path) == ["lease.json"]


def test_a_lease_that_a_dead_mover_took_along_is_made_anew(tmp_path):
    with Lease(tmp_path) as holder:
        (tmp_path / "lease.json").unlink()
        holder.check()
        assert json.loads((tmp_path / "lease.json").read_text()) == holder.me


def test_who_came_while_the_lease_was_in_a_hand_gives_way(tmp_path, meanwhile):
    late, third = Lease(tmp_path), Lease(tmp_path)
    third.me = {**third.me, "host": "far-away", "pid": 7}
    with Lease(tmp_path) as holder:
        moved = meanwhile(lambda: third._claim() or pytest.fail("the place was not free"))
        late._move_aside(STALE)
        assert len(moved) == 1
        holder.check()
        with pytest.raises(ConfigError, match=f"taken over by process {os.getpid()} on"):
            third.check()
        assert names(tmp_path) == ["lease.json"]


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
    assert names(tmp_path) == []


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
