"""Models and tokenizers by content, and directories that are neither."""

import json

import pytest
import torch
from safetensors.torch import save_file

from relax.errors import ArtifactError
from relax.store.fingerprint import model_fingerprint, tokenizer_hash


def write_model(folder, *, value: float = 1.0, name: str = "a", hidden: int = 4):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    save_file({name: torch.full((64, 64), value)}, folder / "model.safetensors")
    return folder


def test_a_copy_elsewhere_is_the_same_model(tmp_path):
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    assert model_fingerprint(one) == model_fingerprint(two)


@pytest.mark.parametrize("change", [{"value": 2.0}, {"name": "b"}, {"hidden": 8}])
def test_other_weights_names_or_config_are_another_model(tmp_path, change):
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two", **change)
    assert model_fingerprint(one) != model_fingerprint(two)


def test_what_is_not_a_model_is_told(tmp_path):
    with pytest.raises(ArtifactError, match=r"nowhere: no such directory"):
        model_fingerprint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"empty/config.json: missing; a model"):
        model_fingerprint(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"empty: no \*.safetensors"):
        model_fingerprint(tmp_path / "empty")


@pytest.mark.parametrize("keep", [0, 4, 60])
def test_a_truncated_header_is_told(tmp_path, keep):
    path = write_model(tmp_path / "one") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=r"model.safetensors: truncated or not a safetensors"):
        model_fingerprint(tmp_path / "one")


def test_truncated_weights_are_told(tmp_path):
    path = write_model(tmp_path / "one") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"its header says \d+: truncated; copy the model"):
        model_fingerprint(tmp_path / "one")


def test_a_tokenizer_is_its_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_hash(tmp_path)
    (tmp_path / "README.md").write_text("no part of it")
    assert tokenizer_hash(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(tmp_path) != before


def test_a_directory_without_a_tokenizer_is_told(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"no tokenizer; looked for tokenizer.json, .* copy"):
        tokenizer_hash(tmp_path)
