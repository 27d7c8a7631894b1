"""Hub names become directories of the local cache before anything is submitted."""

import socket

import pytest
from huggingface_hub import constants

from relax.doctor.hub import resolved
from relax.errors import ConfigError
from relax.flags import load_config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub with one snapshot, on a machine that cannot reach anything."""

    def no_network(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "hub" / "models--org--tiny-0.5B"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_names_become_directories_of_the_cache(cache):
    found = resolved(load_config(None, {"hf_checkpoint": "org/tiny-0.5B", "ref_load": "/x/y"}))
    assert found.model.hf_checkpoint == str(cache)
    assert found.model.ref_load == "/x/y"
    assert found.model.critic_load == ""


def test_a_directory_that_looks_like_a_name_is_one(cache, tmp_path):
    (tmp_path / "org" / "tiny-0.5B").mkdir(parents=True)
    given = load_config(None, {"hf_checkpoint": "org/tiny-0.5B", "opd_teacher_load": "../a/b"})
    assert resolved(given) is given


@pytest.mark.parametrize("field", ["hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load"])
def test_a_name_that_is_not_there_is_one_line(cache, field):
    with pytest.raises(ConfigError) as caught:
        resolved(load_config(None, {field: "org/other"}))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"model.{field} = 'org/other': no such directory, and no snapshot")
    assert line.endswith("run `hf download org/other` first, or give a directory")
