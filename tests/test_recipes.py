"""Every recipe loads and gives its plan; every algorithm of the table has one."""

import json
import tomllib
from pathlib import Path

import pytest

from relax.algorithms import ALGORITHMS
from relax.config import flag_of, section_of, sections
from relax.doctor.cli import as_text
from relax.doctor.plan import plan
from relax.flags import load_config

ROOT = Path(__file__).resolve().parent.parent
RECIPES_DIR = ROOT / "recipes"
RECIPES = sorted(RECIPES_DIR.glob("*.toml"))
LAPTOP = RECIPES_DIR / "gsm8k_cpu.toml"
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
AWAITED = {"slurm", "critic_lr", "use_opd", "opd_kl_coef", "opd_only_reward"}
"""Settings of recipes that may be younger than this test; one that exists is never left out."""


def loaded(path):
    """The recipe's configuration, without the settings that are awaited and not there yet."""
    awaited = AWAITED - {*section_of(), *sections()}
    if not awaited:
        return load_config(path)
    tree = tomllib.loads(path.read_text())
    if "slurm" in awaited and tree.pop("slurm", None):
        del tree["placement"]["executor"]
    assert tree.keys() <= sections().keys()
    given = {name: value for section in tree.values() for name, value in section.items()}
    return load_config(None, {n: v for n, v in given.items() if n not in awaited})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_gives_its_plan(path, tmp_path, capsys):
    config = loaded(path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    head = path.read_text().split("\n[", 1)[0]
    named = {
        field: str(tmp_path)
        for field in ("hf_checkpoint", "ref_load", "opd_teacher_load")
        if flag_of(field) in head
    }
    model = config.model.model_copy(update=named)
    found = plan(config.model_copy(update={"model": model}), ranks=8, gpu=True)
    print(as_text(found))
    shown = capsys.readouterr().out
    assert f"{config.algorithm.advantage_estimator}\n" in shown
    assert f"= {config.responses_per_rollout} responses\n" in shown
    assert "596.0 M parameters" in shown
    assert found.forbidden == []
    assert [line for line in found.warnings if "without eval_prompt_data" not in line] == []
    unset = ["data.prompt_data"] if path == LAPTOP else ["run.run_dir", "data.prompt_data"]
    assert [line.split(":")[0] for line in found.problems if ": not set" in line] == unset


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it(path):
    head = path.read_text().split("\n[", 1)[0]
    assert f"relax train recipes/{path.name} " in head
    assert "relax check" in head


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_template_asks_as_it_is_meant_to(path):
    template = tomllib.loads(path.read_text())["data"]["prompt_template"]
    shown = template.format(input="1 + 1?")
    assert shown.startswith("1 + 1?\n")
    assert "\\boxed{}" in shown
    assert "\\n" not in shown


def test_every_algorithm_has_a_recipe():
    named = {
        tomllib.loads(path.read_text())["algorithm"]["advantage_estimator"] for path in RECIPES
    }
    assert set(ALGORITHMS) == named


def test_the_laptop_recipe_starts_from_the_model_beside_it(tmp_path):
    """It is what the code would write today, so that the file need not be trusted."""
    from safetensors.torch import load_file

    from relax.data.tasks import build_model

    beside = RECIPES_DIR / "tiny_qwen3"
    assert str(beside.relative_to(RECIPES_DIR.parent)) in LAPTOP.read_text()
    made = build_model(
        tmp_path / "model",
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        seed=0,
    )
    old, new = (load_file(d / "model.safetensors") for d in (beside, made))
    assert old.keys() == new.keys() and all(old[n].equal(new[n]) for n in new)
    assert (beside / "tokenizer.json").read_text() == (made / "tokenizer.json").read_text()


def test_no_recipe_names_a_path_of_someones_machine():
    for path in set(RECIPES) - {LAPTOP}:
        told = tomllib.loads(path.read_text())
        assert "model" not in told
        assert not {"run_dir", "prompt_data"} & {
            key for section in told.values() for key in section
        }
