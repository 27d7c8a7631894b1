import json

import pytest

from relax.cli import main
from relax.config import Config
from relax.doctor.disk import disk_facts
from relax.doctor.memory import memory
from relax.doctor.model import ModelSize, model_size
from relax.doctor.plan import batch_facts, plan
from relax.errors import ArtifactError, ConfigError
from relax.flags import load_config
from relax.sizes import in_bytes

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
QWEN3_4B = QWEN3_0_6B | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}


def weigh(directory, name="other.weight"):
    """Weights and a tokenizer that nothing can be said against by their headers."""
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.zeros(3, 4)}, directory / "model.safetensors")
    (directory / "tokenizer.model").write_bytes(b"0")


def model(directory, told):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(told))
    return directory


@pytest.fixture
def small(tmp_path):
    """0.6B by its config.json alone."""
    return model(tmp_path / "qwen", QWEN3_0_6B)


@pytest.mark.parametrize(
    ("told", "published"), [(QWEN3_0_6B, 596_049_920), (QWEN3_4B, 4_022_468_096)]
)
def test_parameters_by_the_shape_are_the_published_number(tmp_path, told, published):
    found = model_size(model(tmp_path / "m", told))
    assert found.num_parameters == published
    assert not found.counted


def test_parameters_are_counted_where_there_are_weights(tmp_path):
    import torch
    from safetensors.torch import save_file

    directory = model(tmp_path / "m", QWEN3_0_6B)
    tensors = {"a": torch.zeros(3, 4), "lm_head.weight": torch.zeros(5)}
    save_file(tensors, directory / "model.safetensors")
    assert model_size(directory).num_parameters == 12  # the tied head is the embedding
    assert model_size(directory).counted


def test_a_config_that_does_not_tell_the_size(tmp_path):
    with pytest.raises(ArtifactError, match=r"config\.json: missing"):
        model_size(tmp_path)
    with pytest.raises(ArtifactError, match="has no num_hidden_layers, num_attention_heads"):
        model_size(model(tmp_path / "m", {"hidden_size": 3, "vocab_size": 3}))


def test_memory_of_a_rank(small):
    size = model_size(small)
    facts = memory(Config(), size, ranks=8, gpu=True)
    per_rank = size.num_parameters * 4 / 8
    assert f"weights {in_bytes(per_rank)}, gradients {in_bytes(per_rank)}" in facts["training"]
    assert f"optimizer {in_bytes(2 * per_rank)}" in facts["training"]
    # 2 bytes x 128 responses x 1,280 tokens x (2 x 28 layers x 8 heads x 128)
    assert facts["sampling"].endswith("at most 17.5 GiB")
    assert "reference" not in facts
    with_reference = load_config(None, {"ref_load": str(small), "use_kl_loss": True})
    found = memory(with_reference, size, ranks=1, gpu=True)
    assert found["reference"] == "2.2 GiB while it scores"  # float32, as all masters
    with_critic = load_config(None, {"advantage_estimator": "ppo"})
    found = memory(with_critic, size, ranks=1, gpu=True)
    assert found["critic"] == "as much again: 8.9 GiB held"


def told(small, ranks=1, gpu=True, **settings) -> dict[str, str]:
    return memory(load_config(None, settings), model_size(small), ranks=ranks, gpu=gpu)


def test_ranks_share_what_is_held_within_a_replica(small):
    assert "weights 568 MiB, gradients 568 MiB" in told(small, 4)["training"]
    found = told(small, 8, num_replicas=4)  # four pairs
    assert found["ranks"] == "8, GPU, in 4 replicas"
    assert "weights 1.1 GiB, gradients 1.1 GiB, optimizer 2.2 GiB" in found["training"]


def test_what_is_offloaded_lies_in_host_memory(small):
    held = "weights 2.2 GiB, gradients 2.2 GiB, optimizer 4.4 GiB"
    found = told(small, offload="cpu")
    assert found["offloaded"] == f"8.9 GiB: {held}, in host memory"
    assert "weights" not in found["training"] and "activations" in found["training"]
    assert held in told(small)["training"]
    assert held in told(small, offload="cpu", gpu=False)["training"]  # the same memory


def test_activations_follow_the_micro_batch_and_what_is_recomputed(small):
    # bytes a token: 28 layers x 1,024 units x 34; a recomputed block keeps its input, 2 bytes
    layer = 1024 * 34
    assert f"activations {in_bytes(8192 * 28 * layer)}" in told(small)["training"]
    one = told(small, micro_batch_size=1)["training"]
    assert f"activations {in_bytes(1280 * 28 * layer)}" in one
    least = 8192 * (layer + 28 * 1024 * 2)  # one block is there while it is computed again
    assert f"activations {in_bytes(least)}" in told(small, recompute_every=1)["training"]
    half = 8192 * (15 * layer + 14 * 1024 * 2)
    assert f"activations {in_bytes(half)}" in told(small, recompute_every=2)["training"]
    few = told(small, rollout_batch_size=1, n_samples_per_prompt=2)["training"]
    assert f"activations {in_bytes(2 * 1280 * 28 * layer)}" in few  # the step has no more


def test_logits_are_those_of_a_tile(small):
    # float32 logits, as many of what is made of them, and a copy in bfloat16
    assert "logits 640 MiB" in told(small)["training"]
    assert "logits 2.0 MiB" in told(small, gpu=False)["training"]
    embedded = 151_936 * 1024
    block = (596_049_920 - embedded) // 28
    gathered = in_bytes((embedded + 2 * block) * 2 + embedded * 4)
    assert f"gathered {gathered}" in told(small)["training"]


def test_the_cache_is_bounded_by_the_models_context(small):
    size = model_size(small)
    assert size.cache_values_per_token == 57_344
    short = ModelSize(**{**vars(size), "context_len": 640})
    assert memory(Config(), short, ranks=1, gpu=True)["sampling"].endswith("at most 8.8 GiB")


def test_batches():
    config = load_config(
        None,
        {
            "rollout_batch_size": 16,
            "n_samples_per_prompt": 4,
            "global_batch_size": 32,
            "num_rollout": 10,
            "rollout_max_prompt_len": 100,
            "rollout_max_response_len": 156,
            "max_tokens_per_gpu": 1024,
        },
    )
    assert batch_facts(config) == {
        "rollout": "16 prompts x 4 = 64 responses",
        "tokens": "at most 9984 sampled a rollout",
        "optimizer steps": "2 a rollout, 20 in all",
        "optimizer step": "8 groups = 32 responses",
        "micro-batches": "at most 8 of 1024 tokens an optimizer step",
    }


def test_disk(small, tmp_path):
    config = load_config(None, {"run_dir": str(tmp_path / "a" / "b"), "num_rollout": 10})
    warnings = []
    facts = disk_facts(config, model_size(small), warnings)
    assert facts["files"] == "12 a step, 120 in all"
    assert "evaluations" not in facts
    assert facts["policy"].startswith("2.8 GiB each")  # the tied head is spelled out
    assert disk_facts(config, model_size(small), [], gpu=True)["policy"].startswith("1.4 GiB each")
    assert facts["checkpoint"] == "6.7 GiB each, 2 kept"
    assert warnings == []
    huge = load_config(None, {"run_dir": str(tmp_path), "num_rollout": 10**9})
    disk_facts(huge, None, warnings)
    assert warnings[-1].startswith("run.run_dir: ")
    assert "the run may take" in warnings[-1]


def files(**settings) -> str:
    return disk_facts(load_config(None, {"num_rollout": 10, **settings}), None, [])["files"]


def test_files_of_scores_rounds_and_jobs():
    assert files(num_steps_per_rollout=2) == "15 a step, 150 in all"
    rounds = {"dynamic_sampling_filter_path": "reward_spread", "dynamic_sampling_max_rounds": 3}
    assert files(**rounds) == "12 a step and 8 a round: 20 to 36 a step, 200 to 360 in all"
    assert files(placement="job", num_steps_per_rollout=2) == "20 a step, 200 in all"
    assert files(placement="job", **rounds).startswith("16 a step and 10 a round: ")
    together = {"allocations": {"a": {}}, "placement": "job", "reward_placement": "inline"}
    for stage in ("rollout", "advantage", "update"):
        together[f"{stage}_allocation"] = "a"
    # rollout; advantage with update: reward between them is in the flow
    assert files(**together) == "14 a step, 140 in all"


def test_evaluations_are_counted(tmp_path):
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n' * 50)
    given = {"eval_prompt_data": str(prompts), "num_rollout": 10, "n_samples_per_eval_prompt": 3}
    facts = disk_facts(load_config(None, given), None, [])
    # 50 prompts x (3 sampled + 1 greedy) x 1,280 tokens of text
    assert facts["evaluations"] == "2 of 3 files, 6 in all; at most 1000 KiB each"
    often = load_config(None, {**given, "eval_interval": 3, "placement": "job"})
    assert disk_facts(often, None, [])["evaluations"].startswith("5 of 4 files, 20 in all")


def test_what_keeps_it_from_starting_is_listed(tmp_path):
    found = plan(load_config(None, {"prompt_data": str(tmp_path / "none.jsonl")}))
    assert [line.split(";")[0] for line in found.problems[:2]] == [
        "run.run_dir: not set",
        "model.hf_checkpoint: not set",
    ]
    assert any("none.jsonl" in problem for problem in found.problems)
    assert "memory per rank" not in found.sections


def test_an_unknown_algorithm_is_told():
    with pytest.raises(ConfigError, match=r"advantage_estimator = 'grppo': known: grpo"):
        plan(load_config(None, {"advantage_estimator": "grppo"}))


def test_what_the_algorithm_forbids_and_ignores(capsys):
    found = plan(load_config(None, {"advantage_estimator": "rloo", "normalize_advantages": True}))
    assert any(line.startswith("algorithm.normalize_advantages = True") for line in found.forbidden)
    facts = found.sections["algorithm"]
    assert "eps_clip" in facts["ignores"].split(", ")
    assert "requires calculate_per_token_loss" in facts
    assert "refuses max_staleness" in facts
    assert main(["check", "--advantage-estimator", "rloo"]) == 2
    assert "not with rloo: algorithm.calculate_per_token_loss" in capsys.readouterr().err


def test_score_is_planned_where_something_is_asked_of_a_model():
    assert "score" not in plan(Config()).sections["stages"]
    two = {"num_steps_per_rollout": 2, "update_placement": "job"}
    assert plan(load_config(None, two)).sections["stages"]["score"] == "job"


def test_a_recipe_with_another_algorithm_says_what_was_reset(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text("[algorithm]\nadvantage_estimator = 'grpo'\neps_clip = 0.3\n")
    assert main(["check", str(path), "--advantage-estimator", "sapo"]) == 1
    assert "warning: sapo in place of grpo: reset" in capsys.readouterr().err


def test_evaluation_is_planned_where_there_are_prompts_for_it():
    assert "evaluate" not in plan(Config()).sections["stages"]
    found = plan(load_config(None, {"eval_prompt_data": "x", "placement": "job"}))
    assert found.sections["stages"]["evaluate"] == "job"


def test_the_command(small, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n' * 64)
    weigh(small)
    words = ["check", "--hf-checkpoint", str(small), "--prompt-data", str(prompts)]
    words += ["--run-dir", str(tmp_path / "run"), "--num-rollout", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "64 in the source, 1.00 epochs" in shown
    assert "Qwen3ForCausalLM, 0.0 M parameters (counted)" in shown
    assert main([*words, "--format", "json", "--ranks", "4", "--gpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == []
    assert told["sections"]["memory per rank"]["ranks"] == "4, GPU"
    assert not (tmp_path / "run").exists()
    asked = {"train": {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8}}
    words += ["--placement", "job", "--update-allocation", "train", "--allocations"]
    assert main([*words, json.dumps(asked), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sections"]["memory per rank"]["ranks"] == "16, GPU"


def test_exit_codes_of_the_command(capsys):
    assert main(["check"]) == 1
    assert "would not start here: run.run_dir: not set; give --run-dir" in capsys.readouterr().err
    assert main(["check", "--lr", "x"]) == 2
    assert main(["check", "--ranks", "0"]) == 2
    assert "--ranks = '0': must be a whole number" in capsys.readouterr().err
    assert main(["check", "--run"]) == 2
    assert capsys.readouterr().err == "relax check: --run: goes with --cluster, which asks SLURM\n"
