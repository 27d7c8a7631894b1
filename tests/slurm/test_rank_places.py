"""From SLURM's and submitit's variables to those of torch.distributed."""

import pytest

from slurm.ranks import expand, place, variables

ON_SLURM = {
    "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-02,7],m3", ["n01", "n02", "n7", "m3"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("a-b[9-10]-x", ["a-b9-x", "a-b10-x"]),
    ],
)
def test_host_lists(nodes, hosts):
    assert expand(nodes) == hosts


def test_rank_of_a_slurm_task():
    where = place(ON_SLURM)
    assert variables(where, timeout_s=60.0) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20000 + (123456 + 2 * 7919) % 12000),
        "RANK_TIMEOUT_S": "60.0",
    }


def test_ranks_of_a_requeued_job_meet_elsewhere():
    first = variables(place({**ON_SLURM, "SLURM_RESTART_COUNT": "0"}), timeout_s=1)
    second = variables(place({**ON_SLURM, "SLURM_RESTART_COUNT": "1"}), timeout_s=1)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]


def test_rank_of_a_local_process():
    where = place(
        {
            "SUBMITIT_LOCAL_JOB_ID": "77",
            "SUBMITIT_LOCAL_NTASKS": "2",
            "SUBMITIT_LOCAL_GLOBALID": "1",
            **ON_SLURM,  # the flow itself may run in a SLURM job
        }
    )
    assert (where.rank, where.num_ranks, where.hosts) == (1, 2, ("127.0.0.1",))


def test_plain_process_is_one_of_one():
    where = place({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})  # a flow inside someone's srun
    assert (where.rank, where.num_ranks, where.restart) == (0, 1, 0)
