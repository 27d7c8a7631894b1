"""A run of three steps, every number typed by hand.

Step 0 asks prompts 0 and 1, step 1 prompts 2 and 3, step 2 (unfinished, epoch 1) 0 and 1 again;
two responses each. The advantages of step 1 lie in another order, and one is missing.
"""

import json

import pytest

from relax.flags import load_config
from relax.schema import ADVANTAGES, EVALS, METRICS, PROMPTS, RESPONSES, REWARDS, SCORES
from relax.store import Output, Run

IDS = 1_000_000
REWARDS_OF = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 1.0], 2: [0.0, 0.0, 0.0, 0.0]}
LENGTHS_OF = {0: [1, 2, 3, 4], 1: [2, 2, 2, 2], 2: [4, 1, 1, 2]}
PROMPTS_OF = {0: [0, 1], 1: [2, 3], 2: [0, 1]}
DRIFT = 0.5


def commit(run, step, stage, attempt="inline-1", seconds=2.0, **tables):
    parts = {"stage": stage, "step": step}
    output = Output(run.root, step, stage, attempt=attempt, key_parts=parts)
    for name, table in tables.items():
        output.write(name, table)
    output.measure("started", 1_700_000_000.0 + step)
    output.measure("host", text="here")
    output.measure("seconds/total", seconds)
    return output.commit()


def prompts(step):
    ids = PROMPTS_OF[step]
    return PROMPTS.table(
        group_id=[step * IDS, step * IDS + 1],
        prompt_id=ids,
        epoch=[step // 2] * 2,
        position=ids,
        cursor=ids,
        prompt=[f"{i}+1=" for i in ids],
        prompt_tokens=[[5, 6], [5, 7]],
        prompt_len=[2, 2],
        label=[str(i + 1) for i in ids],
    )


def responses(step):
    lengths = LENGTHS_OF[step]
    return RESPONSES.table(
        sample_id=[step * IDS + i for i in range(4)],
        group_id=[step * IDS + i // 2 for i in range(4)],
        sample_index=[0, 1, 0, 1],
        policy_version=[step] * 4,
        seed=[7] * 4,
        response=["a" * n for n in lengths],
        tokens=[list(range(10, 10 + n)) for n in lengths],
        mask=[[True] * n for n in lengths],
        rollout_logp=[[-1.0] * n for n in lengths],
        response_len=lengths,
        rollout_logp_sum=[-float(n) for n in lengths],
        finish_reason=["length" if n == 4 else "stop" for n in lengths],
        truncated=[n == 4 for n in lengths],
        num_turns=[1] * len(lengths),
        full_support=[True] * len(lengths),
    )


def rewards(step):
    return REWARDS.table(
        sample_id=[step * IDS + i for i in range(4)],
        group_id=[step * IDS + i // 2 for i in range(4)],
        raw_reward=REWARDS_OF[step],
        reward=[2 * r for r in REWARDS_OF[step]],
    )


def advantages(step, places):
    return ADVANTAGES.table(
        sample_id=[step * IDS + i for i in places],
        group_id=[step * IDS + i // 2 for i in places],
        advantage=[float(i) - 1.0 for i in places],
    )


def scores(step):
    return SCORES.table(
        sample_id=[step * IDS + i for i in range(4)],
        old_logp=[[-1.0 + DRIFT] * n for n in LENGTHS_OF[step]],
    )


def metrics(**values):
    names = list(values)
    return METRICS.table(
        optimizer_step=[0] * len(names),
        metric=[f"train/{name}" for name in names],
        value=list(values.values()),
    )


def evals(version):
    return EVALS.table(
        eval_name=["held_out"] * 2,
        decoding=["greedy"] * 2,
        policy_version=[version] * 2,
        prompt_id=[0, 1],
        sample_index=[0, 0],
        prompt=["8+1=", "9+1="],
        response=["9", "9"],
        label=["9", "10"],
        reward=[1.0, 0.0],
        response_len=[1, 1],
        finish_reason=["stop", "stop"],
    )


def write_run(root):
    config = load_config(None, {"run_dir": str(root), "min_free_gib": 0.0, "num_rollout": 3})
    about = {"schedule_steps": 3, "command": "relax train", "created": "now", "relax": "0.1.0"}
    run = Run.start(config, {"model": "made-up"}, about)
    commit(run, 0, "evaluate", evals=evals(0))
    for step in range(3):
        commit(run, step, "rollout", prompts=prompts(step), responses=responses(step), seconds=4.0)
        attempt = "job-1" if step == 1 else "inline-2"
        commit(run, step, "reward", attempt, rewards=rewards(step))
    commit(run, 0, "advantage", advantages=advantages(0, [0, 1, 2, 3]))
    commit(run, 1, "score", scores=scores(1))
    commit(run, 1, "advantage", advantages=advantages(1, [3, 2, 0]))
    commit(
        run,
        0,
        "update",
        metrics=metrics(pg_clipfrac=0.25, pg_clipfrac_pos=0.15, pg_clipfrac_neg=0.1, grad_norm=2.0),
    )
    commit(run, 1, "update", metrics=metrics(pg_clipfrac=0.5, train_rollout_logprob_abs_diff=0.5))
    for name, record in {"000001-reward-1": {"job_id": "77"}, "000002-advantage-1": {}}.items():
        folder = run.root / "jobs" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(record))
    (run.root / "steps" / "000002" / ".staging-advantage-job-1").mkdir()
    return run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def own_run(tmp_path):
    """One that a test may damage."""
    return write_run(tmp_path / "own")
