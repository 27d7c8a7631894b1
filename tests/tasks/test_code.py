"""The copy of the code in a run: whole or not at all, whoever else makes or leaves one."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relax.errors import ArtifactError
from relax.store import disk
from tasks import code

FILES = {Path(f"relax/m{number}.py"): Path(__file__) for number in range(6)}


def made(target):
    return sorted(path.relative_to(target) for path in target.rglob("*.py"))


@pytest.fixture
def halfway(monkeypatch):
    """Let something happen before the fourth of six files is copied."""
    copied = []

    def add(what):
        copyfile = shutil.copyfile

        def interrupted(source, target):
            copied.append(target)
            if len(copied) == 4:
                what(target)
            return copyfile(source, target)

        monkeypatch.setattr(code.shutil, "copyfile", interrupted)
        return copied

    return add


def leftover_of(target, host, pid):
    folder = target.with_name(f".ab-{host}-{pid}")
    (folder / "relax").mkdir(parents=True)
    (folder / "relax" / "m0.py").touch()
    return folder


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_dead_flows_of_this_host_left_is_removed(tmp_path, dead_pid):
    target, host = tmp_path / "code" / "ab", socket.gethostname()
    gone = [leftover_of(target, host, dead_pid), leftover_of(target, host, os.getpid())]
    left = [leftover_of(target, host, os.getppid()), leftover_of(target, "far-away", dead_pid)]
    code._copy(FILES, target)
    assert made(target) == list(FILES)
    assert [folder.exists() for folder in gone] == [False, False]
    assert [folder.exists() for folder in left] == [True, True]


def test_two_flows_copy_at_the_same_time(tmp_path, halfway, monkeypatch):
    """The second begins and ends while the first, which lives, is half way."""
    target = tmp_path / "code" / "ab"

    def other_flow(_):
        with monkeypatch.context() as patched:
            patched.setattr(code.os, "getpid", os.getppid)
            code._copy(FILES, target)

    copied = halfway(other_flow)
    code._copy(FILES, target)
    assert len({path.parents[1] for path in copied}) == 2  # each had a folder of its own
    assert made(target) == list(FILES)
    assert [path.name for path in target.parent.iterdir()] == ["ab"]


def test_a_copy_that_lost_files_is_not_put_in_place(tmp_path, halfway):
    target = tmp_path / "code" / "ab"

    def sweep(path):
        disk.remove_tree(path.parents[1])
        path.parent.mkdir(parents=True)

    halfway(sweep)
    with pytest.raises(ArtifactError, match="somebody removed files from it"):
        code._copy(FILES, target)
    assert not target.exists()
