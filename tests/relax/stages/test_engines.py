"""How engines are opened, asked and given up: the options, the share of each, the way back."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_cases import do, responses_of

from relax.engines import NotFiniteError, Request, Response, SamplingParams
from relax.errors import ArtifactError
from relax.flags import load_config
from relax.stages import engines, pool
from relax.stages.engines import InProcess, Shard, answered, engine_options, open_engines
from relax.stages.perform import Warm
from relax.stages.pool import EnginePool
from relax.stages.shard_faults import EngineDied, EngineSilent, ShardFailed, told_of_load

PARAMS = SamplingParams()
TALK = Path(__file__).with_name("talk_cases.py")


def shards_of(count):
    return [Shard(i, 2 * i, (Request((1,), 0), Request((1,), 1)), PARAMS) for i in range(count)]


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({}, 1024 + 256),
        ({"eval_max_response_len": 300}, 1024 + 300),
        ({"eval_max_response_len": 100}, 1024 + 256),
        ({"rollout_max_context_len": 512}, 512),
        ({"rollout_max_context_len": 5000}, 1024 + 256),
    ],
)
def test_vllm_is_told_the_longest_sequence(given, longest):
    config = load_config(None, {"rollout_engine": "vllm", "rollout_max_prompt_len": 1024, **given})
    assert engine_options(config)["max_model_len"] == longest


@pytest.mark.parametrize(
    ("given", "is_cut"),
    [({}, False), ({"rollout_top_k": 5}, True), ({"rollout_top_p": 0.9}, True),
     ({"rollout_min_tokens": 2}, True)],
)  # fmt: skip
def test_vllm_is_told_whether_the_distribution_is_cut(given, is_cut):
    config = load_config(None, {"rollout_engine": "vllm", **given})
    assert engine_options(config)["is_cut"] is is_cut


@pytest.mark.parametrize(
    ("given", "kind", "count"),
    [
        ({}, InProcess, None),
        ({"rollout_num_engines": 2}, EnginePool, 2),
        ({"rollout_engine": "vllm"}, EnginePool, 1),
        ({"rollout_engine": "vllm", "rollout_num_engines": 3}, EnginePool, 3),
        ({"rollout_engine": "external", "rollout_external_engine_addrs": ["x:1"]}, InProcess, None),
    ],
)
def test_where_engines_live(given, kind, count):
    opened = open_engines(load_config(None, given))
    assert type(opened) is kind
    if count:
        assert len(opened._gpus) == count


def test_engines_leave_the_gpu_before_the_ranks_train(start, monkeypatch):
    run, warm = start(), Warm()
    do(run, warm=warm)
    opened, closed = warm.engine, []
    monkeypatch.setattr(opened, "close", lambda: closed.append(1))
    monkeypatch.setattr(engines, "device_type", lambda: "cuda")
    for name in ("reward", "advantage"):
        do(run, name, warm=warm)
    assert warm.engine is opened and not closed
    do(run, "update", warm=warm)
    assert warm.engine is None and warm.engine_at == "" and closed == [1]


def test_engines_stay_warm_on_the_cpu(start):
    run, warm = start(), Warm()
    for name in ("rollout", "reward", "advantage", "update"):
        do(run, name, warm=warm)
    assert isinstance(warm.engine, InProcess) and warm.engine_at == run.policy_hash(0)


class Together:
    """Ends the last batch first and the first never."""

    def __init__(self, fault):
        self.fault = fault

    def sample_batches(self, batches, params):
        for place in range(len(batches) - 1, 0, -1):
            yield place, [Response([place], [0.0], "stop")] * len(batches[place])
        raise self.fault


@pytest.mark.parametrize(
    ("fault", "number"),
    [(KeyError("x"), 0), (NotFiniteError("bad", [1], 2), 2), (NotFiniteError("bad", [1]), 0)],
)
def test_shards_that_ended_before_a_fault_are_given_back(fault, number):
    found = []
    with pytest.raises(ShardFailed) as failed:
        found.extend(answered(Together(fault), shards_of(3)))  # type: ignore[arg-type]
    assert failed.value.number == number and failed.value.why is fault

    found = []
    with pytest.raises(ShardFailed):
        for done in answered(Together(fault), shards_of(3)):  # type: ignore[arg-type]
            found.append(done)
    assert [(n, [s.tokens for s in sampled]) for n, sampled in found] == [
        (2, [[2], [2]]),
        (1, [[1], [1]]),
    ]


def pool_of(name, count, timeout_s=5.0):
    made = EnginePool(
        name, {}, num_engines=count, gpus_per_engine=1, timeout_s=timeout_s, num_threads=1
    )
    made._children = [None] * count  # type: ignore[list-item]
    return made


@pytest.mark.parametrize(
    ("name", "engines", "shards", "turn"),
    [("transformers", 2, 8, 1), ("vllm", 2, 8, 4), ("vllm", 3, 8, 3), ("vllm", 1, 8, 8),
     ("vllm", 8, 3, 1), ("external", 1, 5, 5)],
)  # fmt: skip
def test_shards_asked_for_at_once(name, engines, shards, turn):
    assert pool_of(name, engines)._turn(shards_of(shards)) == turn


def test_a_users_function_is_asked_shard_by_shard():
    talks = [Shard(i, i, (), PARAMS, generate="f.py:f") for i in range(4)]
    assert pool_of("vllm", 2)._turn(talks) == 1


class Deaf:
    """A child that never answers."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.theirs, self.asked = theirs, []
        self.child = pool.Child(
            0,
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]),
            pool.Connection(ours.detach()),
        )


@pytest.mark.parametrize(("limit", "waited"), [(0.1, 0.4), (0.6, 0.6)])
def test_a_start_may_take_as_long_as_a_shard(monkeypatch, limit, waited):
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 0.4)
    deaf, made = Deaf(), pool_of("vllm", 1, timeout_s=limit)
    made._children = [deaf.child]
    with pytest.raises(ArtifactError) as told:
        made.load(Path("policies/000003"))
    assert str(told.value) == (
        f"policies/000003: engine 0 did not load this within {waited:g} s and was ended; raise "
        "rollout_timeout_s"
    )
    assert deaf.child.process.poll() == -9 and made._children == []


def test_a_load_that_fails_is_told_in_one_line():
    assert str(told_of_load(EngineDied(1, -9), "p")).startswith(
        "p: the process of engine 1 died while it loaded this (killed by signal 9"
    )
    assert "out of memory while an engine loaded it: no more" in str(
        told_of_load(MemoryError("no more"), "p")
    )
    assert "within 5 s" in str(told_of_load(EngineSilent(1, 5.0), "p"))
    bug = KeyError("x")
    assert told_of_load(bug, "p") is bug


RANK = """
import sys
from relax.stages.perform import perform_all
assert perform_all(sys.argv[1], 0, ["rollout", "reward", "advantage", "update"], "t", lambda: False)
"""


@pytest.mark.integration
@pytest.mark.parametrize(("engine", "count"), [("transformers", 1), ("vllm", 0)])
def test_two_ranks_that_sample_and_train_in_one_job(start, tmp_path, engine, count):
    if engine == "vllm":
        pytest.importorskip("vllm")
    talk = f"{TALK}:tells_its_environment"
    run = start(
        rollout_engine=engine, rollout_num_engines=count, custom_generate_function_path=talk
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    marker = tmp_path / "marker"
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "RANK_TIMEOUT_S": "240", "TALK_MARKER": str(marker),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(run.root)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert len(responses_of(run).tokens) == 8
    assert run.committed(0, "update") is not None
    # LOCAL_WORLD_SIZE is not among them: vLLM sets it for itself.
    ranked = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert not ranked & {*marker.read_text().splitlines()}
