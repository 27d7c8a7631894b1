"""What a log shows of a run: the first and the last step, and one line every ten seconds."""

import pytest

from flows import progress as module
from flows.progress import Progress
from relax.schema import METRICS
from relax.store import Output


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `monotonic` gives; a list of one that tests change."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def finish(tmp_path):
    """Commit a stage with metrics: finish(step, "update", {"train/loss": 1.0}); its manifest."""

    def commit(step, stage, metrics, **timing):
        output = Output(tmp_path, step, stage, attempt="a", key_parts={})
        table = METRICS.table(
            optimizer_step=[0] * len(metrics), metric=list(metrics), value=list(metrics.values())
        )
        output.write("metrics", table)
        for measure, value in timing.items():
            output.measure(measure.replace("_per_", "/"), value)
        return output.commit()

    return commit


def a_step(progress, root, finish, step, reward):
    reports = [
        finish(step, "rollout", {"rollout/response_len/mean": 2.25}, tokens_per_s=12345.6),
        finish(step, "reward", {"rollout/raw_reward": reward}),
        finish(step, "update", {"train/grad_norm": 0.5, "train/loss": 9.0}),
    ]
    for manifest in reports:
        progress.report(root, manifest, False)


def test_lines_of_a_log(tmp_path, finish, clock, capsys):
    progress = Progress(4, "update")
    before = {"eval/held_out/sampled/reward_mean": 0.25, "eval/held_out/greedy/reward_mean": 0.5}
    with progress:
        progress.report(tmp_path, finish(0, "evaluate", before), False)
        for step, reward in enumerate((0.1, 0.2, 0.3, 0.4)):
            a_step(progress, tmp_path, finish, step, reward)
            clock[0] += 5.5
    progress.summary(tmp_path)
    told = "sampled 0.250  greedy 0.500  length 2.2  tok/s 12,346  reward {}  grad 0.50"
    assert capsys.readouterr().err.splitlines() == [
        f"step 1/4  {told.format('0.100')}",
        f"step 3/4  {told.format('0.300')}",  # eleven seconds later
        f"step 4/4  {told.format('0.400')}",
        f"{tmp_path}: 13 stages computed, 0 reused",
    ]


def test_what_was_there_already_is_counted_and_not_told(tmp_path, finish, capsys):
    progress = Progress(1, "update")
    with progress:
        progress.report(tmp_path, finish(0, "update", {"train/grad_norm": 0.5}), True)
    assert progress.numbers() == ""
    progress.summary(tmp_path)
    assert capsys.readouterr().err == f"{tmp_path}: finished already; nothing computed (1 stages)\n"


def test_an_evaluation_alone_tells_its_policy(tmp_path, finish, capsys):
    progress = Progress(4, "evaluate")
    with progress:
        metrics = {"eval/held_out/sampled/reward_mean": 0.75}
        progress.report(tmp_path, finish(3, "evaluate", metrics), False)
    assert capsys.readouterr().err == "policy 3: sampled 0.750\n"
