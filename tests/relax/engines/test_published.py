import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relax.engines import published
from relax.model_dir import weight_files

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def copied(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "policy")


def test_end_tokens(copied):
    assert published.end_token_ids(copied, None) == (1,)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert published.end_token_ids(copied, SimpleNamespace(eos_token_id=1)) == (1, 5, 9)
    (copied / "generation_config.json").unlink()
    assert published.end_token_ids(copied, SimpleNamespace(eos_token_id=7)) == (1, 7)


def test_context_len():
    assert published.context_len({"max_position_embeddings": 64}) == 64
    assert published.context_len({"text_config": {"max_position_embeddings": 32}}) == 32
    assert published.context_len({"n_positions": 16}) == 16
    assert published.context_len({}) == 0


def test_same_architecture():
    config = {"hidden_size": 64, "dtype": "float32"}
    assert published.same_architecture(config, {"hidden_size": 64, "dtype": "bfloat16"})
    assert not published.same_architecture(config, {"hidden_size": 65, "dtype": "float32"})


def test_a_tied_head_is_spelled_out_beside_links_to_the_rest(tiny, copied, tmp_path):
    AutoModelForCausalLM.from_pretrained(copied).save_pretrained(
        tmp_path / "shards", max_shard_size="200KB"
    )
    for policy in (copied, tmp_path / "shards"):
        spelled = published.with_explicit_head(policy, tmp_path / f"{policy.name}-head")
        files = weight_files(spelled)
        assert published.HEAD in files[spelled / "head.safetensors"]
        head = load_file(spelled / "head.safetensors")[published.HEAD]
        (table,) = (path for path, names in files.items() if EMBEDDING in names)
        assert (head == load_file(table)[EMBEDDING]).all()
        assert published.with_explicit_head(policy, spelled) == spelled
        assert published.with_explicit_head(spelled, tmp_path / "none") == spelled
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_digest_of_companions_follows_what_is_read_beside_the_weights(copied):
    before = published.companions_digest(copied)
    (copied / "pytorch_model.bin").write_bytes(b"weights of another format")
    assert published.companions_digest(copied) == before
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates/tool.jinja").write_text("{{ messages }}")
    assert published.companions_digest(copied) != before


def test_an_untied_model_has_its_head_already(make_model, tmp_path):
    policy = make_model(tie_word_embeddings=False)
    assert published.with_explicit_head(policy, tmp_path / "none") == policy
