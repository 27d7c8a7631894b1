"""Rank 0 alone writes tables and commits; what is published, all ranks write."""

import threading

import pytest

from relax.schema import METRICS
from relax.store import Output
from relax.store.commit import POLICIES
from relax.store.manifest import read_manifest

RANKS = 3


@pytest.mark.parametrize("delays", [(0.0, 0.1, 0.0), (0.1, 0.0, 0.0)])
def test_all_ranks_write_before_rank_0_publishes(tmp_path, delays):
    gate = threading.Barrier(RANKS, timeout=20)
    outputs, found = {}, {}

    def rank_of(rank):
        output = Output(
            tmp_path,
            4,
            "update",
            attempt="job-1-77-0",
            key_parts={},
            rank=rank,
            barrier=gate.wait,
        )
        outputs[rank] = output

        def write(directory):
            threading.Event().wait(delays[rank])
            (directory / f"part-{rank}").write_text(str(rank))
            return f"hash by {rank}"

        output.publish(POLICIES, 5, write)
        table = METRICS.table(optimizer_step=[rank], metric=["rank"], value=[float(rank)])
        output.write("metrics", table)
        found[rank] = output.commit() if rank == 0 else None

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manifest = read_manifest(tmp_path / "steps/000004/update")
    assert manifest == found[0]
    assert manifest.policy.hash == "hash by 0"
    assert manifest.policy.bytes == RANKS
    published = sorted(p.name for p in (tmp_path / manifest.policy.name).iterdir())
    assert published == ["part-0", "part-1", "part-2"]
    assert manifest.tables["metrics"].rows == 1
    assert [outputs[rank].published == {} for rank in range(RANKS)] == [False, True, True]
