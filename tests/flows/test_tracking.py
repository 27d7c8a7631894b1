"""wandb offline, for real: names of the metrics table, one run over restarts, no step twice."""

import json
import struct
import time
from pathlib import Path

import pytest

from flows import evaluate, train
from flows.tracking import metrics_of
from relax.flags import load_config
from relax.store import Run
from tasks.stage import perform

wandb = pytest.importorskip("wandb", reason="wandb is not installed")
pytestmark = pytest.mark.integration
SAMPLED = "eval/held_out/sampled/reward_mean"


def records(log: Path):
    """The protobuf records of a wandb log: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = log.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left_in_block = 32768 - place % 32768
        if left_in_block < 7:
            place += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):
            return  # not written to its end yet
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def finished(log: Path, patience_s: float = 60.0):
    """The records of a log that is finished: wandb's own process may write on after finish()."""
    until = time.monotonic() + patience_s
    while True:
        found = list(records(log))
        if any(record.HasField("exit") for record in found) or time.monotonic() > until:
            return found
        time.sleep(0.1)


def history(run_dir: str) -> tuple[set[str], list[dict]]:
    """Run ids and logged rows of all offline logs below a run, read back from wandb's own files."""
    ids, logged = set(), []
    for log in sorted(Path(run_dir).glob("wandb/offline-run-*/*.wandb")):
        for record in finished(log):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                logged.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    return ids, logged


def test_a_resumed_run_goes_on_without_a_step_twice(settings):
    settings |= {"use_wandb": True, "wandb_mode": "offline", "wandb_samples_interval": 2}
    train.run(load_config(None, settings), perform)
    train.run(load_config(None, settings | {"num_rollout": 3}), perform)
    ids, logged = history(settings["run_dir"])
    assert len(ids) == 1
    assert [row["step"] for row in logged] == [0, 1, 2]
    assert {"rollout/raw_reward", "train/loss", "train/grad_norm"} <= logged[0].keys()
    assert ["samples" in row for row in logged] == [True, False, True]


def test_every_evaluation_is_logged_once_and_the_step_that_it_precedes_too(settings, max3):
    held_out = {"eval_prompt_data": str(max3.held_out), "eval_max_response_len": 1}
    settings |= {"use_wandb": True, "wandb_mode": "offline", "wandb_samples_interval": 0}
    train.run(load_config(None, settings), perform)
    evaluate.run(load_config(None, settings | held_out), perform)  # before step 2, as it turns out
    longer = settings | held_out | {"num_rollout": 3}
    train.run(load_config(None, longer), perform)
    train.run(load_config(None, longer), perform)  # finds all of it there
    _, logged = history(settings["run_dir"])
    assert [(row["step"], "train/loss" in row, SAMPLED in row) for row in logged] == [
        (0, True, False), (1, True, False), (2, False, True), (0, False, True), (2, True, False),
        (3, False, True),
    ]  # fmt: skip
    run = Run.open(settings["run_dir"])
    for row in (logged[2], logged[3], logged[5]):
        assert row[SAMPLED] == metrics_of(run, row["step"], ["evaluate"])[SAMPLED]


def test_what_rounds_drew_is_not_mixed_into_the_step(settings, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward(response_text, label):\n    return float(label >= '8')\n"
        "def solved(group):\n    return min(group['reward']) > 0\n"
    )
    settings |= {"use_wandb": True, "wandb_mode": "offline", "num_rollout": 1}
    settings |= {
        "custom_rm_path": f"{reward}:reward",
        "dynamic_sampling_filter_path": f"{reward}:solved",
        "dynamic_sampling_max_rounds": 30,
    }
    train.run(load_config(None, settings), perform)
    run = Run.open(settings["run_dir"])
    drawn = [name for _, name, _ in run.stages(0) if name.startswith("reward.")]
    assert len(drawn) > 1
    _, (row,) = history(settings["run_dir"])
    assert row["rollout/raw_reward"] == 1.0
    assert metrics_of(run, 0, ["reward.1"])["rollout/raw_reward"] < 1.0


def test_off_by_default(settings):
    train.run(load_config(None, settings), perform)
    assert not (Path(settings["run_dir"]) / "wandb").exists()
