"""Engines in processes of their own: the same responses, and what is told when one goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rollout_cases import do, responses_of

from relax.engines import NotFiniteError
from relax.engines.embedded import TransformersEngine
from relax.errors import ArtifactError, ConfigError
from relax.stages.perform import Warm
from relax.stages.pool import gpu_groups
from relax.stages.shard_faults import EngineDied, EngineSilent, ShardFailed, told
from relax.store.commit import parts_dir
from relax.store.parts import finished

TALK = Path(__file__).with_name("talk_cases.py")
ONE_EACH = {"rollout_shard_groups": 1, "rollout_shuffle": False}


def reused(run) -> float:
    return {m: v for m, v, _ in run.committed(0, "rollout").timing}["responses reused"]


@pytest.mark.integration
def test_engines_side_by_side_give_what_one_gives(start, tmp_path):
    alone = start(**ONE_EACH)
    do(alone)
    warm = Warm()
    beside = start(run_dir=str(tmp_path / "pool"), rollout_num_engines=2, **ONE_EACH)
    do(beside, warm=warm)
    assert beside.committed(0, "rollout").identity == alone.committed(0, "rollout").identity
    children = [child.process for child in warm.engine._children]
    assert len(children) == 2 and all(c.poll() is None for c in children)
    # A process that is killed between rollouts is told, and costs one attempt.
    children[1].send_signal(signal.SIGKILL)
    again = start(run_dir=str(tmp_path / "again"), rollout_num_engines=2, **ONE_EACH)
    with pytest.raises(ArtifactError, match=r"engine 1 died \(killed by signal 9"):
        do(again, warm=warm)
    assert warm.engine is None and children[0].wait(timeout=30) is not None
    (shards,) = parts_dir(again.root, 0, "rollout").iterdir()
    kept = finished(again.root, 0, "rollout", shards.name)
    assert kept and 1 not in kept  # how many is a matter of when the death was noticed
    do(again)  # alone: what the pool had finished is not sampled again
    assert again.committed(0, "rollout").identity == alone.committed(0, "rollout").identity
    assert reused(again) == len(kept) * again.config.rollout.n_samples_per_prompt


@pytest.mark.integration
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", r"rollout: step 0, prompts 3 \(shard 3\): the process of engine \d died"),
        ("hangs", r"prompts 3 .*no answer within rollout_timeout_s = 60 .*raise it, or lower"),
    ],
)
def test_a_dead_or_silent_engine_costs_its_shard(start, tmp_path, fault, words):
    settings = {
        # The first shards load tokenizer and function, within the same limit.
        "rollout_num_engines": 2, "rollout_timeout_s": 60.0, **ONE_EACH,
        "custom_generate_function_path": f"{TALK}:{fault}",
    }  # fmt: skip
    run, warm = start(**settings), Warm()
    with pytest.raises(ArtifactError, match=words) as caught:
        do(run, warm=warm)
    assert "\n" not in str(caught.value) and "finished groups are kept" in str(caught.value)
    assert warm.engine is None
    parts = run.root.glob("steps/000000/.rollout.parts/*/[0-9]*/manifest.json")
    assert sorted(path.parent.name for path in parts) == ["0000", "0001", "0002"]


@pytest.mark.integration
def test_no_engine_outlives_the_stage(start, tmp_path):
    run, warm = start(rollout_num_engines=1), Warm()
    do(run, warm=warm)
    process = warm.engine._children[0].process
    warm.engine._children[0].pipe.close()
    assert process.wait(timeout=60) == 0


KILLED = """
import json, sys
from rollout_cases import begin, do
do(begin(json.loads(sys.argv[1])))
"""


@pytest.mark.integration
def test_no_engine_outlives_a_killed_stage(base_settings, tmp_path):
    """It would hold its GPUs for as long as its shard takes."""
    marker = tmp_path / "marker"
    settings = {
        **base_settings,
        "rollout_num_engines": 1,
        "custom_generate_function_path": f"{TALK}:tells_its_process_and_hangs",
    }
    environment = os.environ | {"TALK_MARKER": str(marker)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(settings)], env=environment)
    wait_until(lambda: marker.exists() and marker.read_text())
    engine = int(marker.read_text())
    assert runs(engine)
    killed.kill()
    killed.wait()
    wait_until(lambda: not runs(engine))


def runs(pid: int) -> bool:
    """A process that is there, and not as a zombie that nobody waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: gone between open and read
        return False


def wait_until(happened) -> None:
    for _ in range(1200):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("not in two minutes")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "out of memory: CUDA out of"),
        (MemoryError("no more"), "out of memory: no more; lower rollout_max_batch_tokens"),
        (NotFiniteError("logits are not finite", [0]), "prompts 2 .shard 2.: logits are not"),
        (ArtifactError("a fault"), "prompts 2 .shard 2.: a fault; finished groups are kept"),
        (ConfigError("a setting"), "prompts 2 .shard 2.: a setting; finished groups are kept"),
    ],
)
def test_a_shard_that_fails_is_told_in_one_line(start, monkeypatch, fault, words):
    run, whole, calls = start(**ONE_EACH), TransformersEngine.sample, []

    def sample(self, requests, params):
        calls.append(len(requests))
        if len(calls) == 3:
            raise fault
        return whole(self, requests, params)

    monkeypatch.setattr(TransformersEngine, "sample", sample)
    warm = Warm()
    with pytest.raises((ArtifactError, ConfigError), match=words) as caught:
        do(run, warm=warm)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is (ConfigError if "setting" in words else ArtifactError)
    assert warm.engine is None
    do(run, warm=warm)
    assert calls == [2] * 5  # two of four shards were kept
    assert len(responses_of(run).tokens) == 8


def test_a_function_of_the_users_own_that_fails(start):
    run = start(custom_generate_function_path=f"{TALK}:has_a_bug", **ONE_EACH)
    with pytest.raises(ArtifactError, match=r"prompts 3 .*request 0: ZeroDivisionError: oops"):
        do(run)


def test_only_prompts_with_bad_numbers_are_named():
    failed = ShardFailed(4, NotFiniteError("bad", [0, 1, 5]))
    assert str(told(failed, "rollout: step 1", [10, 11, 12], 2)).startswith(
        "rollout: step 1, prompts 10, 12 (shard 4): bad"
    )
    died = told(ShardFailed(0, EngineDied(1, -11)), "x", [1], 1)
    assert "killed by signal 11" in str(died)
    assert "exit status 3" in str(told(ShardFailed(0, EngineDied(1, 3)), "x", [1], 1))
    silent = told(ShardFailed(0, EngineSilent(0, 5.0)), "x", list(range(20)), 1)
    assert "prompts 0, 1, 2, 3, 4, 5, 6, 7 ... (20 in all)" in str(silent)
    bug = KeyError("x")
    assert told(ShardFailed(0, bug), "x", [1], 1) is bug


def test_engines_share_the_gpus_that_there_are(monkeypatch):
    assert gpu_groups(3, 1) == [None] * 3 or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert gpu_groups(2, 2) == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"3 \* 2: this machine shows 4 GPUs"):
        gpu_groups(3, 2)
