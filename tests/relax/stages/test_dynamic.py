"""Rounds of dynamic sampling: how many, what they keep, and a group's absence explained in SQL."""

from types import SimpleNamespace

import pytest
from rollout_cases import (
    begin,
    do,
    prompts_of,
    responses_of,
    settings_of,
    train_all,
    write_prompts,
)

from flows import train
from flows.launch import planned
from flows.preview import preview
from relax.analytics import open_run
from relax.data.seeds import response_seed
from relax.errors import ArtifactError, ConfigError
from relax.flags import load_config
from relax.stages.filters import FILTERS
from relax.stages.rounds import first_draw, num_rounds, rounds
from relax.store import rows
from tasks import stage
from tasks.placing import gang

SPREAD = '''
def reward(response_text, label):
    """Groups of "mixed" differ for sure: the first character's place decides, and it varies."""
    spread = float(sum(map(ord, response_text)) % 97) / 97
    return {"easy": 1.0, "hard": 0.0}.get(label, spread)
'''
LABELS = ["easy", "mixed", "hard", "hard", "mixed", "mixed", "easy", "mixed", "mixed", "hard"]


def dynamic(model, folder, labels, **changes) -> dict:
    folder.mkdir(exist_ok=True)
    prompts = write_prompts(folder / "prompts.jsonl", labels)
    prompts.with_name("reward.py").write_text(SPREAD)
    return settings_of(model, prompts, folder / "run") | {
        "rollout_shuffle": False,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "over_sampling_batch_size": 3,
        "dynamic_sampling_filter_path": "reward_spread",
        **changes,
    }


@pytest.fixture
def finished(stage_model, tmp_path):
    """Two steps over LABELS: rounds of three prompts until two groups pass."""
    return train_all(dynamic(stage_model, tmp_path, LABELS, num_rollout=2))


def test_rounds_go_on_until_enough_groups_pass(finished):
    # Step 0: easy mixed hard | hard mixed mixed; step 1: easy mixed mixed.
    assert [num_rounds(finished, step) for step in (0, 1)] == [2, 1]
    assert prompts_of(finished, "rollout.1").prompt_id.tolist() == [0, 1, 2]
    assert prompts_of(finished, "rollout.2").prompt_id.tolist() == [3, 4, 5]
    assert prompts_of(finished, "rollout.1", 1).prompt_id.tolist() == [6, 7, 8]
    assert first_draw(finished, 1, 1) == 6 and first_draw(finished, 2, 1) == 9
    kept = prompts_of(finished)
    assert kept.prompt_id.tolist() == [1, 4]
    assert kept.group_id.tolist() == [1, 4]
    assert prompts_of(finished, step=1).prompt_id.tolist() == [7, 8]


def test_a_step_holds_the_rows_of_its_rounds(finished):
    kept = responses_of(finished)
    assert kept.group_id.tolist() == [1] * 4 + [4] * 4
    assert kept.sample_id.tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    of_rounds = {
        sample_id: (tokens.tolist(), logp.tolist())
        for name in ("rollout.1", "rollout.2")
        for sample_id, tokens, logp in zip(
            *[
                getattr(responses_of(finished, name), c)
                for c in ("sample_id", "tokens", "rollout_logp")
            ],
            strict=True,
        )
    }
    for sample_id, tokens, logp in zip(
        kept.sample_id.tolist(), kept.tokens, kept.rollout_logp, strict=True
    ):
        assert (tokens.tolist(), logp.tolist()) == of_rounds[sample_id]
    rewards = rows(finished.table(0, "reward", "rewards"))
    assert rewards.sample_id.tolist() == kept.sample_id.tolist()
    for group in (1, 4):
        values = rewards.reward[rewards.group_id == group]
        assert values.min() < values.max()
    metrics = rows(finished.table(0, "rollout", "metrics"))
    found = dict(zip(metrics.metric, metrics.value.tolist(), strict=True))
    assert found["rollout/dynamic/rounds"] == 2
    assert found["rollout/dynamic/groups_sampled"] == 6
    assert found["rollout/dynamic/passed_frac"] == 0.5
    assert found["rollout/dynamic/too_easy_frac"] == pytest.approx(1 / 6)
    assert found["rollout/dynamic/too_hard_frac"] == pytest.approx(2 / 6)
    assert found["rollout/dynamic/surplus_groups"] == 1


def test_an_absent_group_is_explained_in_sql(finished):
    run = open_run(finished.root)
    fates = run.sql(
        "SELECT step, round, prompt_id, fate FROM candidates ORDER BY step, prompt_id"
    ).fetchall()
    easy, hard = "reward_spread: too easy", "reward_spread: too hard"
    assert fates == [
        (0, 1, 0, easy), (0, 1, 1, "trained"), (0, 1, 2, hard), (0, 2, 3, hard),
        (0, 2, 4, "trained"), (0, 2, 5, "surplus: the step was full, or never finished"),
        (1, 1, 6, easy), (1, 1, 7, "trained"), (1, 1, 8, "trained"),
    ]  # fmt: skip
    # Every prompt is drawn once an epoch, whatever became of it.
    uneven = "SELECT epoch, prompt_id FROM candidates GROUP BY ALL HAVING count(*) <> 1"
    assert run.sql(uneven).fetchall() == []
    # Responses that were not trained on are in no view of those that were.
    assert run.sql("SELECT count(*) FROM responses").fetchall() == [(16,)]
    assert run.sql("SELECT count(*) FROM prompts").fetchall() == [(4,)]
    stages = "SELECT DISTINCT stage FROM metrics WHERE stage LIKE '%.%' ORDER BY 1"
    assert [s for (s,) in run.sql(stages).fetchall()] == [
        "reward.1", "reward.2", "rollout.1", "rollout.2",
    ]  # fmt: skip


@pytest.mark.parametrize("after", range(7))
def test_a_step_left_anywhere_goes_on_there(stage_model, tmp_path, finished, after):
    config = load_config(None, dynamic(stage_model, tmp_path / "again", LABELS, num_rollout=2))
    asked = []

    def some(session, step, name):
        if len(asked) == after:
            raise KeyboardInterrupt
        asked.append((step, name))
        return stage.perform(session, step, name)

    with pytest.raises(KeyboardInterrupt):
        train.run(config, some)
    reused = []

    def rest(session, step, name):
        reused.append(stage.perform(session, step, name)[1])

    train.run(config, rest)
    assert reused == [True] * after + [False] * (len(reused) - after)
    again = type(finished).open(config.run.run_dir)
    for step in (0, 1):
        for name in ("rollout", "reward", "advantage", "update"):
            assert again.committed(step, name).identity == finished.committed(step, name).identity


def test_a_prompt_that_comes_again_in_a_step_is_sampled_anew(stage_model, tmp_path):
    """Two prompts, rounds of two: the second round draws both again, in the next epoch."""
    settings = dynamic(
        stage_model, tmp_path, ["hard", "mixed"], over_sampling_batch_size=2, rollout_batch_size=2
    )
    run = train_all(settings)
    assert num_rounds(run, 0) == 2
    second = prompts_of(run, "rollout.2")
    assert (second.prompt_id.tolist(), second.epoch.tolist()) == ([0, 1], [1, 1])
    assert responses_of(run, "rollout.2").seed.tolist() == [
        response_seed(42, 0, prompt, i) for prompt in (0, 1) for i in range(4, 8)
    ]
    assert prompts_of(run).prompt_id.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["hard"] * 6, "0 of 2 groups passed reward_spread in 2 rounds of 6 groups: 0 too easy "
         r"\(all passed\), 6 too hard \(none\), 0 otherwise; .* with easier prompts"),
        (["easy"] * 6, "6 too easy .* with harder prompts"),
    ],
)  # fmt: skip
def test_a_task_that_teaches_nothing_is_reported(stage_model, tmp_path, labels, words):
    settings = dynamic(stage_model, tmp_path, labels, dynamic_sampling_max_rounds=2)
    with pytest.raises(ArtifactError, match=words):
        train_all(settings)
    # What was sampled is there, and says why.
    fates = open_run(settings["run_dir"]).sql("SELECT DISTINCT fate FROM candidates").fetchall()
    assert fates == [(f"reward_spread: too {labels[0]}",)]


def test_more_rounds_go_on_from_those_there_are(stage_model, tmp_path):
    labels = ["hard"] * 6 + ["mixed"] * 3
    settings = dynamic(stage_model, tmp_path, labels, dynamic_sampling_max_rounds=2)
    with pytest.raises(ArtifactError, match="in 2 rounds"):
        train_all(settings)
    run = train_all({**settings, "dynamic_sampling_max_rounds": 3})
    assert num_rounds(run, 0) == 3
    assert prompts_of(run).prompt_id.tolist() == [6, 7]


def test_another_filter_is_another_step(stage_model, tmp_path):
    settings = dynamic(stage_model, tmp_path, LABELS, num_rollout=1)
    train_all(settings)
    with pytest.raises(ConfigError, match="dynamic_sampling_filter_path"):
        train_all({**settings, "dynamic_sampling_filter_path": "raw_reward_spread"})


def test_a_filter_that_comes_later_is_another_run(stage_model, tmp_path):
    settings = dynamic(stage_model, tmp_path, LABELS)
    plain = {**settings, "dynamic_sampling_filter_path": "", "over_sampling_batch_size": 0}
    train_all(plain)
    with pytest.raises(ConfigError, match="content of dynamic_sampling_filter_path"):
        train_all({**plain, "dynamic_sampling_filter_path": "reward_spread"})


def test_filters():
    flat = {"reward": [1.0, 1.0], "raw_reward": [1.0, 0.0]}
    assert [FILTERS[n](flat) for n in ("reward_spread", "raw_reward_spread")] == [False, True]


def test_a_filter_of_the_users_own(stage_model, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def long(group):\n    return max(group['response_len']) > 0\n")
    run = train_all(
        dynamic(stage_model, tmp_path, LABELS, dynamic_sampling_filter_path=f"{path}:long")
    )
    assert prompts_of(run).prompt_id.tolist() == [0, 1]
    assert str(tmp_path) not in str(run.committed(0, "reward.1").key_parts)


def test_without_a_filter_there_are_no_rounds(start):
    run = start()
    assert list(rounds(run.config, run, 0)) == []
    do(run)
    assert first_draw(run, 3, 0) == 12


def test_planning_sees_one_round(stage_model, tmp_path):
    run = begin(dynamic(stage_model, tmp_path, LABELS))
    assert list(rounds(run.config, run, 0)) == [1]


def test_a_job_ends_where_the_number_of_rounds_is_decided(stage_model, tmp_path):
    settings = dynamic(stage_model, tmp_path, LABELS, placement="job", executor="slurm")
    allocation = {"gpus_per_node": 1}
    config = load_config(
        None,
        {
            **settings,
            "allocations": {"one": allocation},
            **{f"{s}_allocation": "one" for s in ("rollout", "reward", "advantage", "update")},
        },
    )
    plan = planned(train.steps, SimpleNamespace(config=config, run=begin(settings)))[0]
    assert plan == ["rollout.1", "reward.1", "rollout", "reward", "advantage", "update"]
    assert gang(config, plan, "rollout.1") == ("rollout.1", "reward.1")
    assert gang(config, plan, "rollout") == ("rollout", "reward", "advantage", "update")
    assert gang(config, plan, "reward.2") == ("rollout.2", "reward.2")
    assert "rollout.1 + reward.1, step 0" in preview(config, train.steps)
