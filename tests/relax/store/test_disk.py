"""Small files written whole, and looks at files that another process is removing."""

import os
import pathlib
import shutil

import pytest

from relax.store import disk
from relax.store.commit import parts_dir
from relax.store.parts import finished


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path, did = tmp_path / "a.json", []
    disk.write_whole(path, b"first")
    for name in ("write_bytes", "rename", "fsync_dir"):
        own = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda *of, n=name, f=own: did.append(n) or f(*of))
    disk.write_whole(path, b"second")
    assert did == ["write_bytes", "rename", "fsync_dir"]
    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]

    def fails(*_):
        raise OSError("no")

    monkeypatch.setattr(disk, "rename", fails)
    with pytest.raises(OSError, match="no"):
        disk.write_whole(path, b"third")
    assert path.read_bytes() == b"second"


def test_size_of_a_directory_that_is_being_removed(tmp_path, monkeypatch):
    (tmp_path / "c" / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (tmp_path / "c" / name).write_bytes(bytes(5))
    assert disk.size(tmp_path / "c") == 15
    stat = pathlib.Path.stat

    def last_look(self, **how):
        found = stat(self, **how)
        shutil.rmtree(tmp_path / "c")
        return found

    monkeypatch.setattr(pathlib.Path, "stat", last_look)
    assert disk.size(tmp_path / "c") == 5
    assert disk.size(tmp_path / "c") == 0


def test_shards_that_are_swept_while_they_are_counted(tmp_path, monkeypatch):
    folder = parts_dir(tmp_path, 0, "rollout") / "key"
    for shard in ("0000", "0001"):
        (folder / shard).mkdir(parents=True)
        (folder / shard / "manifest.json").touch()
    assert finished(tmp_path, 0, "rollout", "key") == {0, 1}
    scandir, swept = os.scandir, []

    def late(path):
        if not swept:
            swept.append(path)
            shutil.rmtree(folder)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert finished(tmp_path, 0, "rollout", "key") == set()
    assert not folder.exists()
