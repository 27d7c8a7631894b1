"""wandb offline, for real: names of the metrics table, one run over restarts, no step twice."""

import json
import struct
from pathlib import Path

import pytest

from flows import train
from relax.flags import load_config
from tasks.stage import perform

wandb = pytest.importorskip("wandb", reason="wandb is not installed")
pytestmark = pytest.mark.integration


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
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history(run_dir: str) -> tuple[set[str], list[dict]]:
    """Run ids and logged rows of all offline logs below a run, read back from wandb's own files."""
    ids, logged = set(), []
    for log in sorted(Path(run_dir).glob("wandb/offline-run-*/*.wandb")):
        for record in records(log):
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
    assert [row["_step"] for row in logged] == [0, 1, 2]
    assert {"rollout/raw_reward", "train/loss", "train/grad_norm"} <= logged[0].keys()
    assert ["samples" in row for row in logged] == [True, False, True]


def test_off_by_default(settings):
    train.run(load_config(None, settings), perform)
    assert not (Path(settings["run_dir"]) / "wandb").exists()
