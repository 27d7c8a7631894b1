"""A node's own copy of a model: made once, verified, and done without where there is no room."""

import json
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from relax.errors import ArtifactError
from relax.store import local
from relax.store.fingerprint import model_fingerprint
from relax.store.local import local_model


@pytest.fixture
def model(tmp_path):
    """A model whose weights are a link, as in a snapshot of the hub's cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.ones(64, 64)}, tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    return folder


@pytest.fixture
def node(tmp_path, monkeypatch):
    """The node's local directory."""
    monkeypatch.setenv(local.LOCAL_DIR, str(tmp_path / "node"))
    monkeypatch.setattr(local, "SPARE_BYTES", 0)
    return tmp_path / "node"


def test_a_copy_has_all_files_and_is_made_once(model, node):
    content = model_fingerprint(model)
    copy = local_model(model, content)
    assert copy == node / "models" / content
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in model.iterdir())
    assert not (copy / "model.safetensors").is_symlink()
    made = (copy / "model.safetensors").stat().st_ino
    assert (local_model(model, content) / "model.safetensors").stat().st_ino == made
    assert sorted(p.name for p in copy.parent.iterdir()) == sorted([content, f"{content}.lock"])


def test_processes_that_ask_at_once_make_one(model, node, monkeypatch):
    content, made, make = model_fingerprint(model), [], local._make
    monkeypatch.setattr(local, "_make", lambda *words: (made.append(1), make(*words)))
    threads = [threading.Thread(target=local_model, args=(model, content)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_damaged_copy_is_made_again(model, node):
    content = model_fingerprint(model)
    weights = local_model(model, content) / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) - 100)
    assert (local_model(model, content) / "model.safetensors").read_bytes() == whole


def test_a_model_that_is_not_the_runs_is_not_copied(model, node):
    with pytest.raises(ArtifactError, match="changed since the run began"):
        local_model(model, "0" * 64)
    assert [p.name for p in (node / "models").iterdir()] == [f"{'0' * 64}.lock"]


def test_without_room_the_model_is_read_where_it_is(model, node, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert local_model(model, model_fingerprint(model)) == model
    (line,) = capsys.readouterr().err.splitlines()
    assert "0.0 GiB free" in line and line.endswith(f"{model} is read instead")


def test_a_disk_that_fails_meanwhile_leaves_nothing(model, node, monkeypatch, capsys):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert local_model(model, model_fingerprint(model)) == model
    assert "No space left on device" in capsys.readouterr().err
    assert [p.suffix for p in (node / "models").iterdir()] == [".lock"]


def test_without_a_local_directory_there_are_no_copies(model, monkeypatch):
    monkeypatch.delenv(local.LOCAL_DIR, raising=False)
    assert local_model(model, "") == model
