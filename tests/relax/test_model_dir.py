"""A model directory by its small parts: what is not whole is told in one line."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax.errors import ArtifactError
from relax.model_dir import (
    INDEX,
    VOCABULARIES,
    all_shapes,
    check_tokenizer,
    has_tokenizer,
    read_config,
    weight_files,
)
from relax.store.fingerprint import tokenizer_hash

FILES = {"a.safetensors": ["embed", "head"], "b.safetensors": ["norm"]}
SHAPES = {"embed": [3, 2], "head": [3, 2], "norm": [2]}


def write(directory, files):
    """A model whose files hold the named tensors; with an index where there are several."""
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 2}')
    for file, names in files.items():
        save_file({n: np.zeros(SHAPES[n], np.float32) for n in names}, directory / file)
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    return directory


@pytest.fixture
def single(tmp_path):
    return write(tmp_path / "single", {"model.safetensors": SHAPES})


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "sharded", FILES)


def error_of(read, directory):
    with pytest.raises(ArtifactError) as error:
        read(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_whole_models(single, sharded):
    assert read_config(single) == {"hidden_size": 2}
    assert weight_files(single) == {single / "model.safetensors": SHAPES}
    assert {path.name: list(shapes) for path, shapes in weight_files(sharded).items()} == FILES
    assert all_shapes(sharded) == SHAPES


def test_files_that_the_index_leaves_out_are_no_part_of_the_model(sharded):
    save_file({"other": np.zeros(1, np.float32)}, sharded / "optimizer.safetensors")
    assert all_shapes(sharded) == SHAPES


def test_missing_parts(single, sharded):
    assert error_of(read_config, single / "none").startswith(f"{single}/none: no such directory; ")
    (single / "model.safetensors").unlink()
    assert error_of(weight_files, single).startswith(f"{single}: no *.safetensors; save the model")
    (single / "config.json").unlink()
    assert error_of(read_config, single).startswith(f"{single}/config.json: missing; a model in")
    (sharded / "b.safetensors").unlink()
    assert error_of(weight_files, sharded).startswith(f"{sharded}/b.safetensors: missing; copy the")


def test_truncated_weights(single):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    said = f"{path}: {len(whole) - 4} bytes, its header says {len(whole)}: truncated; copy the"
    assert error_of(weight_files, single).startswith(said)
    for size in (100, 4, 0):
        path.write_bytes(whole[:size])
        assert f"{path}: truncated or not a safetensors file" in error_of(weight_files, single)
    path.write_bytes(whole[:8] + b"[" + whole[9:])
    assert f"{path}: its header is damaged" in error_of(weight_files, single)


def test_damaged_json(single, sharded):
    for text, said in (
        ('{"a": ', "damaged: Expecting value"),
        ("[]", "damaged: not a JSON object"),
    ):
        (single / "config.json").write_text(text)
        assert said in error_of(read_config, single)
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": []}'):
        (sharded / INDEX).write_text(text)
        assert f"{INDEX}: damaged: no weight_map; copy the model" in error_of(weight_files, sharded)


def test_a_file_without_its_tensor(sharded):
    where = {"weight_map": {"embed": "a.safetensors", "norm": "a.safetensors"}}
    (sharded / INDEX).write_text(json.dumps(where))
    said = "a.safetensors: tensor norm is in the index but not in the file"
    assert error_of(weight_files, sharded).endswith(said)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_is_one_of_its_files(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ArtifactError, match=r"no tokenizer; looked for tokenizer.json, .* copy"):
        check_tokenizer(tmp_path)
    (tmp_path / name).write_text("")
    assert has_tokenizer(tmp_path)
    check_tokenizer(tmp_path)
    assert len(tokenizer_hash(tmp_path)) == 64
