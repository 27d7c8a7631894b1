import json

import pytest

from relax.data.order import draw
from relax.data.prompts import content_hash, load_tokenizer
from relax.data.tasks import TASKS, build_model, write_task
from relax.errors import ConfigError


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("name", "label"), [("max3", "8"), ("sort3", "138")])
def test_labels(tmp_path, name, label):
    files = write_task(name, tmp_path, seed=0)
    rows = rows_of(files.train) + rows_of(files.held_out)
    assert {"input": "381=", "label": label} in rows
    assert {"input": "000=", "label": "0" if name == "max3" else "000"} in rows


def test_the_split_is_whole_disjoint_and_seeded(tmp_path):
    files = write_task("max3", tmp_path / "a", seed=0)
    train, held_out = ([row["input"] for row in rows_of(f)] for f in (files.train, files.held_out))
    assert (len(train), len(held_out)) == (800, 200)
    assert sorted(train + held_out) == [f"{number:03d}=" for number in range(1000)]
    assert train == sorted(train)
    shuffled = draw(1000, start=0, count=200, seed=0, shuffle=True)
    assert sorted(f"{one.prompt_id:03d}=" for one in shuffled) == held_out
    again = write_task("max3", tmp_path / "b", seed=0)
    other = write_task("max3", tmp_path / "c", seed=1)
    assert again.train.read_bytes() == files.train.read_bytes() != other.train.read_bytes()


def test_unknown_task_and_impossible_split(tmp_path):
    with pytest.raises(ConfigError, match="task = 'max4'; known: max3, sort3; did you mean max3"):
        write_task("max4", tmp_path, seed=0)
    for num_held_out in (0, 1000):
        with pytest.raises(ConfigError, match=f"num_held_out = {num_held_out}; 1 to 999"):
            write_task("max3", tmp_path, num_held_out=num_held_out, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_is_one_token_a_character(tokenizer):
    assert len(tokenizer) == 64
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    text = " 3 8=\\boxed{1,2}\n#### it's .5 ? "
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("9=A\u00e9").input_ids == [12, 44, 2, 2]
    assert tokenizer("8<eos>").input_ids == [11, 1]
    assert tokenizer.decode([11, 1, 0], skip_special_tokens=True) == "8"
    assert max(len(label) for label in (TASKS["max3"]("381"), TASKS["sort3"]("381"))) == 3


@pytest.mark.parametrize(("tie", "num_parameters"), [(True, 402_176), (False, 402_176 + 64 * 128)])
def test_model_size_and_round_trip(tmp_path, tie, num_parameters):
    import torch
    from transformers import AutoModelForCausalLM

    assert build_model(tmp_path, seed=0, tie=tie) == tmp_path
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.tie_word_embeddings == tie
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert load_tokenizer(tmp_path)("381=").input_ids == [6, 11, 4, 44]


def test_model_depends_on_its_seed_alone(tmp_path):
    import torch

    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = build_model(tmp_path / "a", seed=0, **sizes)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second, third = (
        build_model(tmp_path / name, seed=s, **sizes) for name, s in (("b", 0), ("c", 1))
    )
    assert content_hash(first) == content_hash(second) != content_hash(third)


def test_sizes_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size = 63; the tokenizer needs 64 or more"):
        build_model(tmp_path, seed=0, vocab_size=63)
    with pytest.raises(ConfigError, match="num_kv_heads = 3; it must divide num_heads = 4"):
        build_model(tmp_path, seed=0, num_kv_heads=3)
