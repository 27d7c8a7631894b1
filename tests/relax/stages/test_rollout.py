"""What a rollout holds: order, seeds, log-probabilities, limits, and every prompt once an epoch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from rollout_cases import (
    begin,
    do,
    plain_logp,
    prompts_of,
    responses_of,
    settings_of,
    train_all,
    write_prompts,
)
from safetensors.torch import load_file, save_file

from relax.analytics import open_run
from relax.data.order import draw
from relax.data.seeds import response_seed
from relax.errors import ArtifactError, ConfigError
from relax.flags import load_config
from relax.stages.engines import checked_policy
from relax.stages.models import given_model
from relax.stages.perform import Warm
from relax.stages.reward import overlong_penalty
from relax.store import rows

EOS = 1


def test_groups_come_in_the_order_of_the_prompt_stream_with_seeds_of_their_own(start):
    run = start(rollout_seed=7)
    do(run)
    prompts, responses = prompts_of(run), responses_of(run)
    drawn = draw(6, start=0, count=4, seed=7, shuffle=True)
    assert prompts.prompt_id.tolist() == [d.prompt_id for d in drawn]
    assert prompts.cursor.tolist() == prompts.position.tolist() == [0, 1, 2, 3]
    assert prompts.epoch.tolist() == [0] * 4
    assert prompts.prompt == [f"{d.prompt_id:03d}=" for d in drawn]
    assert prompts.group_id.tolist() == [0, 1, 2, 3]
    assert responses.sample_id.tolist() == list(range(8))
    assert responses.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert responses.sample_index.tolist() == [0, 1] * 4
    assert responses.seed.tolist() == [
        response_seed(7, 0, d.prompt_id, i) for d in drawn for i in range(2)
    ]
    assert run.committed(0, "rollout").notes["prompt stream"] == {
        "start": 0, "end": 4, "prompts in an epoch": 6, "shuffle": True, "seed": 7,
    }  # fmt: skip


def test_a_prompt_that_comes_twice_in_a_step_gets_other_seeds(start):
    run = start(rollout_batch_size=12)
    do(run)
    prompts, responses = prompts_of(run), responses_of(run)
    assert prompts.epoch.tolist() == [0] * 6 + [1] * 6
    assert len(set(responses.seed.tolist())) == 24
    again = int(np.flatnonzero(prompts.prompt_id[6:] == prompts.prompt_id[0])[0]) + 6
    first_id = int(prompts.prompt_id[0])
    assert responses.seed[2 * again] == response_seed(42, 0, first_id, 2)


def test_every_prompt_is_consumed_once_an_epoch(base_settings):
    """Six prompts, four a step, six steps: four epochs, each prompt once in each."""
    train_all({**base_settings, "num_rollout": 6, "lr": 1e-5})
    run = open_run(base_settings["run_dir"])
    uneven = run.sql(
        "SELECT epoch, prompt_id, count(*) FROM prompts GROUP BY ALL HAVING count(*) <> 1"
    )
    assert uneven.fetchall() == []
    epochs = run.sql("SELECT epoch, count(*), count(DISTINCT prompt_id) FROM prompts GROUP BY 1")
    assert sorted(epochs.fetchall()) == [(0, 6, 6), (1, 6, 6), (2, 6, 6), (3, 6, 6)]
    cursors = run.sql("SELECT step, cursor FROM prompts ORDER BY step, cursor").fetchall()
    assert cursors == [(n // 4, n) for n in range(24)]
    orders = run.sql("SELECT list(prompt_id ORDER BY position) FROM prompts GROUP BY epoch")
    assert len({tuple(order) for (order,) in orders.fetchall()}) > 1


def test_without_shuffle_prompts_come_in_the_order_of_the_file(start):
    run = start(rollout_shuffle=False)
    do(run)
    assert prompts_of(run).prompt_id.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "temperature", "full"),
    [
        ({}, 1.0, True),
        ({"rollout_temperature": 0.6}, 0.6, True),
        ({"rollout_temperature": 1.5, "rollout_top_k": 5}, 1.5, False),
        ({"rollout_top_p": 0.5}, 1.0, False),
        ({"rollout_min_tokens": 3}, 1.0, False),
    ],
)
def test_log_probs_are_of_the_whole_softmax_at_the_temperature(
    start, stage_model, changes, temperature, full
):
    run = start(**changes)
    do(run)
    prompts, responses = prompts_of(run), responses_of(run)
    for place in range(8):
        tokens = responses.tokens[place].tolist()
        prompt = prompts.prompt_tokens[place // 2].tolist()
        expected = plain_logp(stage_model, prompt, tokens, temperature)
        assert responses.rollout_logp[place] == pytest.approx(expected, abs=2e-5)
        assert responses.rollout_logp_sum[place] == pytest.approx(expected.sum(), abs=1e-4)
    assert responses.full_support.tolist() == [full] * 8
    assert metrics_of(run)["rollout/full_support"] == full


def test_a_response_is_the_same_in_any_shard(start, tmp_path):
    whole, cut = start(), start(run_dir=str(tmp_path / "cut"), rollout_shard_groups=1)
    do(whole)
    do(cut)
    assert [t.tolist() for t in responses_of(cut).tokens] == [
        t.tolist() for t in responses_of(whole).tokens
    ]


def test_truncated_responses_are_marked_and_count_their_tokens(start):
    run = start(rollout_ignore_eos=True)
    do(run)
    responses = responses_of(run)
    assert responses.finish_reason == ["length"] * 8
    assert responses.truncated.tolist() == [True] * 8
    assert responses.response_len.tolist() == [6] * 8
    assert all(mask.all() and len(mask) == 6 for mask in responses.mask)
    assert metrics_of(run)["rollout/truncated_ratio"] == 1.0


def test_responses_stop_at_ids_and_texts_and_not_before_min_tokens(start, tmp_path):
    digits = list(range(3, 13))
    run = start(rollout_stop_token_ids=digits, rollout_max_response_len=60)
    do(run)
    for tokens, reason in zip(
        responses_of(run).tokens, responses_of(run).finish_reason, strict=True
    ):
        ends = [t in digits or t == EOS for t in tokens.tolist()]
        assert not any(ends[:-1]) and ends[-1] == (reason == "stop")
    late = start(
        run_dir=str(tmp_path / "late"), rollout_stop_token_ids=digits, rollout_min_tokens=10,
        rollout_max_response_len=60,
    )  # fmt: skip
    do(late)
    assert min(responses_of(late).response_len) > 10
    text = start(run_dir=str(tmp_path / "text"), rollout_stop=["a"], rollout_max_response_len=60)
    do(text)
    for response, reason in zip(
        responses_of(text).response, responses_of(text).finish_reason, strict=True
    ):
        assert "a" not in response[:-1]
        assert reason == "stop" or "a" not in response


@pytest.mark.parametrize("skipped", [True, False])
def test_special_tokens_in_the_text(start, skipped):
    run = start(rollout_skip_special_tokens=skipped, rollout_max_response_len=200)
    do(run)
    responses = responses_of(run)
    ended = [
        t for t, r in zip(responses.response, responses.finish_reason, strict=True) if r == "stop"
    ]
    assert ended and all(text.endswith("<eos>") != skipped for text in ended)


def test_empty_responses_are_data(base_settings):
    """The prompts of four tokens leave no room: the step goes through, and trains on nothing."""
    path = Path(base_settings["prompt_data"])
    rows = path.read_text().splitlines()[:-1] + ['{"input": "1=", "label": "1"}']
    short = path.with_name("short.jsonl")
    short.write_text("\n".join(rows))
    settings = {"prompt_data": str(short), "rollout_shuffle": False, "rollout_max_context_len": 4}
    run = train_all(base_settings | settings)
    responses = responses_of(run)
    assert responses.response_len.tolist() == [0] * 8
    assert responses.response == [""] * 8
    assert responses.finish_reason == ["length"] * 8
    assert responses.rollout_logp_sum.tolist() == [0.0] * 8
    assert metrics_of(run)["rollout/empty_frac"] == 1.0
    assert metrics_of(run, "update")["train/skipped_steps"] == 1.0


def test_log_probs_that_are_not_finite_name_their_prompts(start, tmp_path):
    run = start()
    base = tmp_path / "broken"
    shutil.copytree(run.config.model.hf_checkpoint, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    broken = start(run_dir=str(tmp_path / "nan"), hf_checkpoint=str(base), rollout_shuffle=False)
    with pytest.raises(ArtifactError, match=r"step 0, prompts 0, 1, 2, 3 .*not finite"):
        do(broken)


def test_settings_that_need_each_other():
    for settings, match in (
        ({"rollout_engine": "external"}, "go together"),
        ({"rollout_external_engine_addrs": ["localhost:1"]}, "go together"),
        ({"over_sampling_batch_size": 8}, "nothing would be left out"),
        ({"overlong_buffer_len": 999}, "is more than rollout_max_response_len"),
        ({"rollout_min_tokens": 999}, "is more than rollout_max_response_len"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_config(None, settings)


def test_overlong_shaping_costs_more_with_each_token():
    config = load_config(
        None,
        {"overlong_buffer_len": 4, "overlong_penalty_factor": 0.5, "rollout_max_response_len": 10},
    )
    penalty = overlong_penalty(config, np.array([0, 6, 7, 8, 10]))
    assert penalty.tolist() == [0.0, 0.0, 0.125, 0.25, 0.5]


def test_overlong_shaping_is_in_the_reward_and_not_in_what_the_verifier_gave(start):
    run = start(overlong_buffer_len=6, rollout_ignore_eos=True)
    do(run)
    do(run, "reward")
    rewards = rows(run.table(0, "reward", "rewards"))
    assert (rewards.raw_reward - rewards.reward).tolist() == [1.0] * 8
    assert metrics_of(run, "reward")["rollout/overlong_penalty"] == 1.0


def test_the_label_decides_in_these_tests(stage_model, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", ["easy", "hard"])
    run = begin({
        **settings_of(stage_model, prompts, tmp_path / "run"),
        "rollout_batch_size": 2, "rollout_shuffle": False,
    })  # fmt: skip
    do(run)
    do(run, "reward")
    assert rows(run.table(0, "reward", "rewards")).reward.tolist() == [1.0, 1.0, 0.0, 0.0]


def metrics_of(run, stage="rollout", step=0):
    metrics = rows(run.table(step, stage, "metrics"))
    return dict(zip(metrics.metric, metrics.value.tolist(), strict=True))


def test_engine_and_trainer_read_the_nodes_copy(start, monkeypatch, tmp_path):
    monkeypatch.setenv("RELAX_LOCAL_DIR", str(tmp_path / "node"))
    run = start(local_models=True)
    copy = tmp_path / "node" / "models" / run.sources["model"]
    warm = Warm()
    do(run, warm=warm)
    assert given_model(run, "model") == checked_policy(run, 0) == copy
    assert [p.name for p in copy.parent.iterdir() if p.is_dir()] == [copy.name]
    plain = start(run_dir=str(tmp_path / "plain"))
    do(plain)
    assert run.committed(0, "rollout").content == plain.committed(0, "rollout").content
    for name in ("reward", "advantage", "update"):
        do(run, name)
        do(plain, name)
    assert run.policy_hash(1) == plain.policy_hash(1)
