"""What sbatch is given, and what a job's environment is cleaned of. No cluster needed."""

import os
import subprocess
from pathlib import Path

import pytest

from slurm import entry, records
from slurm.errors import JobError
from slurm.ranks import place
from slurm.resources import Resources
from slurm.site import Site
from slurm.submit import Order, clean_environment, refusal, script, submit


def order(**more):
    given = {
        "executor": "slurm",
        "name": "run/000003/rollout",
        "target": "relax.stages.perform:perform_all",
        "calls": ({},),
        "attempt": "job-1",
        "resources": Resources(),
        "code": Path("/runs/x/code/ab"),
        "allocation": "train",
    }
    return Order(**{**given, **more})


def options(text):
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines()]
    return dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))


def test_script_holds_everything_that_was_asked_for():
    asked = Resources(
        partition="a100",
        account="lab",
        qos="long",
        constraint="80g",
        reservation="friday",
        exclude="n[3-4]",
        nodes=2,
        tasks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=6,
        mem_gb=64.5,
        minutes=90,
        extra={"switches": 1},
    )
    text = script(Path("/runs/x/jobs/000003-rollout-1"), order(resources=asked))
    found = options(text)
    expected = {
        "partition": "a100",
        "account": "lab",
        "qos": "long",
        "constraint": "80g",
        "reservation": "friday",
        "exclude": "'n[3-4]'",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "6",
        "mem": "66048M",
        "time": "90",
        "switches": "1",
        "job-name": "run/000003/rollout",
        "output": "/runs/x/jobs/000003-rollout-1/job.log",
        "signal": "USR2@90",
    }
    assert {name: found[name] for name in expected} == expected
    assert "export PYTHONPATH=/runs/x/code/ab" in text


def test_srun_gets_the_cpus_that_it_does_not_inherit():
    text = script(Path("/f"), order(resources=Resources(cpus_per_task=6, tasks_per_node=2)))
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    for word in ("--cpus-per-task=6", "--kill-on-bad-exit=1", "--wait=60", "--label"):
        assert f" {word} " in srun


def test_warning_signal_of_a_short_job_comes_late_in_it():
    assert "--signal=USR2@15" in script(Path("/f"), order(resources=Resources(minutes=1)))


def test_several_calls_are_an_array_with_a_log_each():
    text = script(Path("/f"), order(calls=({}, {}, {})))
    assert options(text)["array"] == "0-2%3"
    assert options(text)["output"] == "/f/%a.log"


def test_container_of_the_site_reaches_the_command():
    site = Site(container="apptainer", image="relax.sif", python="python3")
    command = script(Path("/f"), order(site=site)).splitlines()[-1]
    assert " apptainer exec --nv relax.sif env PYTHONPATH=" in command
    assert " python3 -u -m submitit.core._submit /f" in command


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("sbatch: error: invalid partition specified: x", "change partition of"),
        ("Invalid account or account/partition combination specified", "change account or"),
        ("Invalid qos specification", "change qos of"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "change minutes of"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "change qos, account, nodes or minutes of",
        ),
        ("Requested node configuration is not available", "change gpus_per_node, cpus_per_task"),
        ("Memory specification can not be satisfied", "change mem_gb of"),
        ("Something unheard of", "look at"),
    ],
)
def test_refusal_says_what_to_change(words, remedy):
    text = refusal(order(), words)
    assert remedy in text
    assert "[slurm.allocations.train]" in text
    assert words.removeprefix("sbatch: error: ") in text


def test_environment_of_an_outer_job_is_taken_out_and_put_back(monkeypatch):
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SRUN_DEBUG", "SUBMITIT_EXECUTOR", "RANK"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    before = dict(os.environ)
    with clean_environment(PYTHONPATH="/code"):
        left = [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_"))]
        assert left == ["SLURM_CONF"]
        assert "RANK" not in os.environ
        assert os.environ["PYTHONPATH"] == "/code"
    assert dict(os.environ) == before


def test_other_threads_find_their_environment_at_every_moment(monkeypatch):
    """What an outer job left is taken out and put back name by name; the rest is never touched."""
    monkeypatch.setenv("SLURM_JOB_ID", "outer")
    monkeypatch.setenv("OF_ANOTHER_THREAD", "1")
    touched, unset, put = [], os.unsetenv, os.putenv
    monkeypatch.setattr(os, "unsetenv", lambda name: [touched.append(name), unset(name)])
    monkeypatch.setattr(os, "putenv", lambda name, value: [touched.append(name), put(name, value)])
    with clean_environment(OWN="1"):
        os.environ["MORE"] = "of the job"
    assert {b"MORE", b"OWN", b"SLURM_JOB_ID"} <= set(touched)
    assert not {b"PATH", b"HOME", b"OF_ANOTHER_THREAD"} & set(touched)
    assert "MORE" not in os.environ and "OWN" not in os.environ
    assert os.environ["SLURM_JOB_ID"] == "outer"


def test_local_jobs_leave_the_processes_of_other_threads_alone(tmp_path, monkeypatch):
    """A job has a session of its own; what others start meanwhile has theirs."""
    import submitit.local.local as theirs

    seen, start = [], theirs.start_controller

    def meanwhile(**asked):
        process = start(**asked)
        seen.append((subprocess.Popen, os.getsid(process.pid) == process.pid))
        return process

    monkeypatch.setattr(theirs, "start_controller", meanwhile)
    popen = subprocess.Popen
    records.claim(tmp_path / "job", {})
    (tmp_path / "local_target.py").write_text("def run(attempt, stop): pass\n")
    (tmp_path / "slurm").symlink_to(Path(records.__file__).parent)
    here = order(executor="local", target="local_target:run", code=tmp_path)
    job = submit(tmp_path / "job", here)
    assert seen == [(popen, True)]
    os.waitpid(int(job.job_id), 0)
    row = records.accounting(tmp_path / "job")
    assert row is not None
    assert row["state"] == "COMPLETED"


def test_too_few_cpus_fail_clearly(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(JobError, match="may use 2 CPUs, cpus_per_task = 3; check srun's"):
        entry.check_cpus(3, place({}))
    entry.check_cpus(2, place({}))
    assert capsys.readouterr().out.splitlines()[1].endswith("2 CPUs, 2 asked for")


def test_debug_executor_runs_in_this_process_and_raises_what_is_raised(tmp_path):
    records.claim(tmp_path / "job", {"step": 3})
    told = {"directory": str(tmp_path)}
    here = order(executor="debug", target="debug_target:run", calls=(told, told))
    (tmp_path / "debug_target.py").write_text(
        "import os\ndef run(directory, attempt, stop):\n"
        "    assert os.environ['WORLD_SIZE'] == '1' and not stop()\n"
        "    open(directory + '/said', 'a').write(attempt.rsplit('-', 2)[0])\n"
        "    if attempt == 'x': raise KeyError\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        submit(tmp_path / "job", here)
        assert (tmp_path / "said").read_text() == "job-1job-1"
        row = records.accounting(tmp_path / "job")
        assert row is not None
        assert row["state"] == "COMPLETED"
        with pytest.raises(TypeError):
            submit(tmp_path / "job", order(executor="debug", target="debug_target:run"))
