"""`relax check --cluster` over a cluster that is made up: what is asked, and how it is told."""

import json

import pytest

from flows import check as checks
from relax.cli import main
from slurm import records
from slurm.outcome import Done
from slurm.probe import Partition

ALLOCATIONS = {
    "big": {"partition": "gpu", "nodes": 2, "gpus_per_node": 4, "minutes": 120},
    "cpu": {"partition": "cpu", "minutes": 3},
}
FINDINGS = {"rank": 0, "host": "n1", "imports": {"fine": True, "said": "torch in 2.0 s"}}


class Job:
    """One that wrote what its ranks found before anybody looked."""

    job_id = "7"

    def outcome(self, watch, committed):
        assert committed()
        return Done()


@pytest.fixture
def sent(monkeypatch):
    """Orders that were submitted to a cluster of two partitions, each answered at once."""
    orders = []
    offered = {
        "gpu": Partition("gpu", 3, 64, 512_000, 8, 600.0),
        "cpu": Partition("cpu", 4, 64, 512_000, 0, float("inf")),
    }

    def submit(folder, order):
        orders.append(order)
        for rank in range(order.resources.num_ranks):
            records.write(folder / f"probe-{rank}.json", {**FINDINGS, "rank": rank})
        return Job()

    monkeypatch.setattr(checks.probe, "partitions", lambda: offered)
    monkeypatch.setattr(checks.probe, "scheduler_says", lambda root, order: "starts now")
    monkeypatch.setattr(checks, "submit", submit)
    return orders


def words(tmp_path, allocations=ALLOCATIONS, *more):
    given = ["check", "--cluster", "--placement", "job", "--run-dir", str(tmp_path / "run")]
    given += ["--allocations", json.dumps(allocations), "--update-allocation", "big"]
    for stage in ("rollout", "reward", "advantage"):
        given += [f"--{stage}-allocation", "cpu"]
    return [*given, *more]


def test_a_short_job_in_each_allocation(sent, tmp_path, capsys):
    assert main(words(tmp_path, ALLOCATIONS, "--run")) == 0
    assert [(o.resources.nodes, o.resources.minutes) for o in sent] == [(1, 3), (2, 5)]
    assert {o.target for o in sent} == {"slurm.probe:on_node"}
    assert capsys.readouterr().out.splitlines() == [
        "allocation cpu (rollout, reward, advantage):",
        "  the largest that fits partition cpu: 4 nodes x (0 GPUs, 64 CPUs, 500.0 GB), "
        "no time limit",
        "  accepted: starts now",
        "  rank 0 on n1: imports fine: torch in 2.0 s",
        "allocation big (update):",
        "  the largest that fits partition gpu: 3 nodes x (8 GPUs, 64 CPUs, 500.0 GB), 600 minutes",
        "  accepted: starts now",
        "  rank 0 on n1: imports fine: torch in 2.0 s",
        "  rank 1 on n1: imports fine: torch in 2.0 s",
    ]


def test_the_same_for_programs(sent, tmp_path, capsys):
    assert main(words(tmp_path, ALLOCATIONS, "--run", "--format", "json")) == 0
    cpu, big = json.loads(capsys.readouterr().out)["allocations"]
    assert (cpu["allocation"], cpu["accepted"], cpu["faults"]) == ("cpu", "starts now", [])
    assert [found["imports"]["said"] for found in big["ranks"]] == ["torch in 2.0 s"] * 2


def test_what_does_not_fit_is_not_sent(sent, tmp_path, capsys):
    asked = {**ALLOCATIONS, "cpu": {"partition": "cpu", "nodes": 9}}
    assert main(words(tmp_path, asked, "--run", "--format", "json")) == 1
    cpu, big = json.loads(capsys.readouterr().out)["allocations"]
    assert cpu["faults"] == ["nodes = 9: partition cpu has 4"] and cpu["accepted"] == ""
    assert big["accepted"] == "starts now" and sent == []


def test_a_job_that_fails_is_told_with_its_reason(sent, tmp_path, capsys, monkeypatch):
    from slurm.outcome import Failed

    failed = Job()
    failed.outcome = lambda watch, committed: Failed("TIMEOUT", "it took too long")
    monkeypatch.setattr(checks, "submit", lambda folder, order: failed)
    monkeypatch.setattr(checks, "log_tail", lambda folder, lines: "the end of the log")
    assert main(words(tmp_path, ALLOCATIONS, "--run")) == 1
    assert "  job 7: it took too long\nthe end of the log\n" in capsys.readouterr().out
