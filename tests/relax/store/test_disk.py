"""Looks at files that another process is removing."""

import os
import pathlib
import shutil

from relax.store import disk
from relax.store.commit import parts_dir
from relax.store.parts import finished


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
