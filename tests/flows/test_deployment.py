"""`prefect deployment run` against a real server and a real worker."""

import json
import os
import re
import shlex
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from documented import ROOT, with_prefect

from relax.store import Run
from slurm.jobs import unfinished

pytestmark = pytest.mark.integration


def of_server(environment, kind: str, **filters):
    request = urllib.request.Request(
        f"{environment['PREFECT_API_URL']}/{kind}/filter",
        data=json.dumps(filters).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_killed_worker_run_again_continues(settings, deployment, deployment_run, prefect_server):
    """A worker killed mid-run: the deployment is run again and continues."""
    worker = deployment()
    settings |= {"num_rollout": 60}
    deployment_run(settings)
    wait_for_updates(settings["run_dir"], 3)
    worker.kill()
    done_at_kill = Run.open(settings["run_dir"]).num_updates()
    assert 3 <= done_at_kill < 60, "the run was over before the worker was killed"
    first = Run.open(settings["run_dir"]).committed(0, "rollout")

    deployment()
    settings |= {"num_rollout": done_at_kill + 3}
    deployment_run(settings, "--watch")
    run = Run.open(settings["run_dir"])
    assert run.num_updates() >= done_at_kill + 3
    assert run.committed(0, "rollout") == first  # nothing was sampled again

    # The server may hear of states, artifacts and logs after the flow's end.
    states = lambda name: task_states(prefect_server, settings["run_dir"], name)  # noqa: E731
    last = f"{done_at_kill + 2:04d}-update"
    until(lambda: sorted(states("0000-rollout")) == ["Completed", "Reused"], "not reused")
    until(lambda: states(last) == ["Completed"], f"{last} was not completed")
    artifacts = lambda: of_server(prefect_server, "artifacts")  # noqa: E731
    until(lambda: ("table", "steps") in {(a["type"], a["key"]) for a in artifacts()}, "no table")
    link = run.root.as_uri()
    until(lambda: any(link in a["data"] for a in artifacts() if a["key"] is None), "no link")


def test_the_readmes_own_line(deployment, prefect_cli, prefect_server, tmp_path):
    """It trains by a recipe with another algorithm, and the log says what that one resets."""
    deployment()
    recipe = tmp_path / "recipe.toml"
    shipped = (ROOT / "recipes/gsm8k_cpu.toml").read_text()
    recipe.write_text(shipped.replace("eps_clip = 0.2\n", "eps_clip = 0.2\neps_clip_c = 3.0\n"))
    row = {"question": "What is 1+1?", "answer": "#### 2"}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    line = with_prefect()["deployment run"]
    for shown, here in {
        "recipes/gsm8k_cpu.toml": recipe,
        "gsm8k/train.jsonl": tmp_path / "train.jsonl",
        "runs/cispo": tmp_path / "run",
    }.items():
        assert line.count(shown) == 1
        line = line.replace(shown, str(here))
    said = prefect_cli(*shlex.split(line)[1:], "--watch")
    run = Run.open(tmp_path / "run")
    assert run.num_updates() == 2
    algorithm = run.config.algorithm
    assert (algorithm.advantage_estimator, algorithm.eps_clip_c) == ("cispo", None)
    reset = "cispo in place of grpo: reset, for cispo does not use them: eps_clip_c = 3.0"
    (run_id,) = re.findall(r"UUID: (\S+)", said)
    until(lambda: reset in log_of(prefect_server, run_id), "what was reset is not in the log")


def test_what_jobs_write_is_in_the_log_and_not_on_the_terminal(settings, prefect_server, relax):
    """`relax train` against a server, with the settings for Prefect that are shipped."""
    given = {**settings, "num_rollout": 1, "reward_placement": "job"}
    process = relax("train", given, prefect_server)
    assert process.wait(timeout=300) == 0, process.log.read_text()
    newest = of_server(prefect_server, "flow_runs", sort="START_TIME_DESC")[0]["id"]
    asked_for = lambda line: line.endswith("CPUs, 1 asked for")  # noqa: E731
    until(lambda: any(map(asked_for, log_of(prefect_server, newest))), "the job's output is lost")
    said = process.log.read_text().splitlines()
    assert [line for line in said if "asked for" in line or "low run" in line] == []
    assert len(said) == 2, said  # the step, and what was computed


def test_cancelling_takes_the_flow_and_its_jobs(
    settings, deployment, deployment_run, prefect_cli, prefect_server
):
    deployment()
    settings |= {"num_rollout": 500, "placement": "job"}
    deployment_run(settings)
    wait_for_updates(settings["run_dir"], 1)
    jobs = Path(settings["run_dir"]) / "jobs"
    until(lambda: unfinished(jobs), "no job was running")
    running = of_server(prefect_server, "flow_runs", sort="START_TIME_DESC")[0]["id"]
    prefect_cli("flow-run", "cancel", running)
    assert state_of(prefect_server, running) == "Cancelled"
    until(lambda: not unfinished(jobs), "a job lived on")
    # What jobs wrote is in their tasks' logs.
    logged = lambda: any("submitit" in line for line in log_of(prefect_server, running))  # noqa: E731
    until(logged, "the jobs' output is not there")


def test_cancelling_a_run_that_no_worker_watches(settings, prefect_server, prefect_cli, relax):
    """The flow asks the server itself, ends after the stage in hand, and keeps what it has."""
    process = relax("train", settings | {"num_rollout": 500}, prefect_server)
    wait_for_updates(settings["run_dir"], 1)
    running = of_server(prefect_server, "flow_runs", sort="START_TIME_DESC")[0]["id"]
    prefect_cli("flow-run", "cancel", running)
    assert process.wait(timeout=300) == 130, process.log.read_text()
    assert state_of(prefect_server, running) == "Cancelled"
    assert 1 <= Run.open(settings["run_dir"]).num_updates() < 500


def test_without_a_server_prefect_brings_its_own(settings, relax, tmp_path):
    process = relax("train", settings, {"PREFECT_HOME": str(tmp_path / "home")})
    code, output = process.wait(timeout=300), process.log.read_text()
    assert code == 0, output
    assert "starting a temporary Prefect server" in output
    assert Run.open(settings["run_dir"]).num_updates() == 2


def test_ctrl_c_ends_a_flow_with_a_server_of_its_own(settings, relax, tmp_path):
    """A terminal sends it to the whole group, and the flow still tells the server how it ended."""
    process = relax(
        "train", settings | {"num_rollout": 500}, {"PREFECT_HOME": str(tmp_path / "home")}
    )
    wait_for_updates(settings["run_dir"], 1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130, process.log.read_text()
    said = process.log.read_text()
    asked, ended = said.split("\nstopping after this stage; Ctrl-C again: at once\n")
    assert asked.startswith("starting a temporary Prefect server")
    line = f"stopped; run the same command again to continue {settings['run_dir']}\n"
    assert re.sub(r"^step .*\n", "", ended, flags=re.M) == line
    assert 1 <= Run.open(settings["run_dir"]).num_updates() < 500


def log_of(environment, run_id: str) -> list[str]:
    """The messages of a flow run and its tasks."""
    own = {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
    return [line["message"] for line in of_server(environment, "logs", **own)]


def state_of(environment, run_id: str) -> str:
    """The state that a flow run ends in."""
    for _ in range(600):
        name = next(
            r["state_name"] for r in of_server(environment, "flow_runs") if r["id"] == run_id
        )
        if name not in ("Running", "Cancelling", "Pending", "Scheduled"):
            return name
        time.sleep(0.2)
    raise AssertionError(f"flow run {run_id} did not end")


def task_states(environment, run_dir: str, name: str) -> list[str]:
    """The states of all runs of a task, in the flow runs on `run_dir`."""
    ids = [
        flow_run["id"]
        for flow_run in of_server(environment, "flow_runs")
        if (flow_run["parameters"].get("overrides") or {}).get("run_dir") == run_dir
    ]
    wanted = {"task_runs": {"name": {"any_": [name]}}, "flow_runs": {"id": {"any_": ids}}}
    return [task_run["state_name"] for task_run in of_server(environment, "task_runs", **wanted)]


def wait_for_updates(run_dir, wanted: int) -> int:
    """How many updates there are once there are `wanted`."""

    def enough() -> int:
        try:
            done = Run.open(run_dir).num_updates()
        except ValueError:
            return 0
        return done if done >= wanted else 0

    return until(enough, f"{run_dir}: {wanted} updates did not come")


def until(ask, complaint: str):
    """The first true answer of `ask`."""
    for _ in range(1200):
        if answer := ask():
            return answer
        time.sleep(0.1)
    raise AssertionError(complaint)
