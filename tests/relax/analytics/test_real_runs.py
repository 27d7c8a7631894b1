"""Questions to runs that were really made: of several turns, of rounds, and by default settings."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from flows import train
from relax.analytics import open_run
from relax.analytics.questions import question
from relax.analytics.sample import sample, summary
from relax.analytics.show import folded, step_states
from relax.cli import main
from relax.doctor.disk import disk_facts, files_fact
from relax.flags import load_config
from relax.store import Run
from relax.store.commit import step_dir
from tasks import stage

PYTHON = '''
async def with_a_tool(conversation):
    """A turn, what a tool says to it, and another turn."""
    await conversation.sample(max_tokens=3)
    conversation.append("=42 ")
    await conversation.sample()

def reward(response_text, label):
    """Groups of "mixed" differ for sure: the characters decide, and they vary."""
    spread = float(sum(map(ord, response_text)) % 97) / 97
    return {"easy": 1.0, "hard": 0.0}.get(label, spread)
'''
LABELS = ["easy", "mixed", "hard", "hard", "mixed", "mixed", "easy", "mixed", "mixed", "hard"]
SEVERAL_TURNS = {"custom_generate_function_path": "with_a_tool", "rollout_max_response_len": 12}
TWO_STEPS = {"num_steps_per_rollout": 2, "lr": 3e-2}
ROUNDS = {
    "rollout_shuffle": False,
    "over_sampling_batch_size": 3,
    "dynamic_sampling_filter_path": "reward_spread",
}


@pytest.fixture(scope="module")
def model():
    """The model that the recipes come with; nobody writes there."""
    return Path(__file__).parents[3] / "recipes/tiny_qwen3"


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Train with some settings: the run. Paths of functions are completed."""

    def run(labels=("mixed",) * 4, *, evaluated=False, **settings) -> Run:
        root = tmp_path_factory.mktemp("run")
        (root / "own.py").write_text(PYTHON)
        lines = [json.dumps({"input": f"{n}=", "label": x}) + "\n" for n, x in enumerate(labels)]
        (root / "prompts.jsonl").write_text("".join(lines))
        if evaluated:
            settings["eval_prompt_data"] = str(root / "prompts.jsonl")
        for name in settings.keys() & {"custom_generate_function_path"}:
            settings[name] = f"{root / 'own.py'}:{settings[name]}"
        train.run(
            load_config(
                None,
                {
                    "run_dir": str(root / "run"),
                    "hf_checkpoint": str(model),
                    "prompt_data": str(root / "prompts.jsonl"),
                    "custom_rm_path": f"{root / 'own.py'}:reward",
                    "num_rollout": 2,
                    "rollout_batch_size": 2,
                    "n_samples_per_prompt": 4,
                    "rollout_max_response_len": 6,
                    "min_free_gib": 0,
                    **settings,
                },
            ),
            stage.perform,
        )
        return Run.open(root / "run")

    return run


@pytest.fixture(scope="module")
def talked(trained):
    return trained(**SEVERAL_TURNS, **TWO_STEPS)


@pytest.fixture(scope="module")
def drawn_in_rounds(trained):
    """Step 0: easy mixed hard | hard mixed mixed; step 1: easy mixed mixed."""
    return trained(LABELS, **ROUNDS)


def answer(run: Run, name: str) -> list[tuple]:
    return open_run(run.root).sql(question(name).sql(1)).fetchall()


def test_drift_is_that_of_the_policys_own_tokens(talked):
    opened = open_run(talked.root)
    ((valid, there),) = opened.sql(
        "SELECT sum(response_len)::INT, sum(len(tokens))::INT FROM responses"
    ).fetchall()
    found = answer(talked, "drift-by-position")
    assert sum(count for _, count, *_ in found) == valid < there
    assert max(most for *_, most in found) < 1e-3


def test_clipping_by_sign_is_what_the_update_clipped(talked):
    found = answer(talked, "clip-by-sign")
    assert [row[:2] for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    whole = {(step, place): clipped for step, place, clipped, *_ in answer(talked, "clip-fraction")}
    for step, place, above, below in found:
        assert above + below == pytest.approx(whole[step, place])  # no advantage is 0 here
        assert (above + below > 0) == (place == 1)  # the ratio of a first optimizer step is 1
    assert max(above for *_, above, _ in found) > 0 and max(below for *_, below in found) > 0


def test_a_run_by_default_settings_answers_that_nothing_was_clipped(trained):
    assert answer(trained(), "clip-by-sign") == [(0, 0, 0.0, 0.0), (1, 0, 0.0, 0.0)]


def test_a_filtered_group_is_consumed_too(drawn_in_rounds):
    assert answer(drawn_in_rounds, "consumed-once") == [(0, 9, 0, 0)]
    ((kept,),) = open_run(drawn_in_rounds.root).sql("SELECT count(*) FROM prompts").fetchall()
    assert kept == 4


def files_of_step(run: Run, step: int = 0, *, evaluation: bool = False) -> int:
    """What a finished step, or the evaluation at it, leaves; not the policy: it is replaced."""
    folders = [step_dir(run.root, step), *run.root.glob(f"jobs/{step:06d}-*")]
    files = [str(path) for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum(("evaluate" in path) == evaluation for path in files)


def test_a_finished_step_has_the_files_that_check_tells(trained, talked, drawn_in_rounds):
    plain = trained(num_rollout=1)
    assert files_of_step(plain) == 12
    assert files_fact(plain.config) == "12 a step, 12 in all"
    assert files_of_step(talked) == 15  # with the stage score
    assert files_fact(talked.config) == "15 a step, 30 in all"
    assert [files_of_step(drawn_in_rounds, step) for step in (0, 1)] == [28, 20]
    assert files_fact(drawn_in_rounds.config).startswith("12 a step and 8 a round: ")


def test_jobs_add_one_file_each_and_an_evaluation_three(trained):
    run = trained(**TWO_STEPS, num_rollout=1, placement="job", executor="debug", evaluated=True)
    assert files_of_step(run) == 20
    assert files_fact(run.config) == "20 a step, 20 in all"
    assert [files_of_step(run, step, evaluation=True) for step in (0, 1)] == [4, 4]
    facts = disk_facts(run.config, None, [])
    assert facts["evaluations"].startswith("2 of 4 files, 8 in all")


def test_rounds_have_a_column_and_their_bytes_count(drawn_in_rounds, capsys):
    states = step_states(drawn_in_rounds)
    assert [state.rounds for state in states] == [2, 1]
    for state in states:
        tables = step_dir(drawn_in_rounds.root, state.step).rglob("*.arrow")
        assert state.bytes == sum(path.stat().st_size for path in tables)
    assert [len(group) for group in folded(states)] == [1, 1]  # a checkpoint of the last alone
    assert main(["show", str(drawn_in_rounds.root)]) == 0
    title, first = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "┃│"][:2]
    assert [cell.strip() for cell in title.split("┃")][1:4] == ["step", "rounds", "rollout"]
    assert [cell.strip() for cell in first.split("│")][1:4] == ["0", "2", "ok"]


def test_a_round_that_was_left_is_not_taken_for_its_stage(drawn_in_rounds, tmp_path):
    root = tmp_path / "left"
    shutil.copytree(drawn_in_rounds.root, root)
    for name in ("rollout", "reward", "reward.2", "advantage", "update"):
        shutil.rmtree(step_dir(root, 0) / name)
    (step_dir(root, 0) / ".staging-reward.2-inline-1-2").mkdir()
    (step_dir(root, 0) / ".rollout.3.parts").mkdir()
    (step_dir(root, 0) / "mine").mkdir()
    first = step_states(Run.open(root))[0]
    assert first.stages == {
        "rollout.1": "committed", "reward.1": "committed", "rollout.2": "committed",
        "reward.2": "unfinished", "rollout.3": "unfinished",
    }  # fmt: skip
    assert (first.rounds, first.worst_round) == (3, "unfinished")


def test_the_numbers_under_a_response_are_of_valid_tokens(talked):
    found = sample(talked, 0, 0)
    assert not found["mask"].all()
    own = found["rollout_logp"][found["mask"]]
    said = summary(found["rollout_logp"], found["mask"], "logp")
    assert said == (
        f"logp: {own.min():.4g} to {own.max():.4g}, mean {own.mean():.4g}; "
        f"{len(own)} of {len(found['mask'])} tokens valid"
    )
    nothing = np.zeros(len(own), bool)
    assert summary(own, nothing, "logp") == f"no valid token among {len(own)}"
