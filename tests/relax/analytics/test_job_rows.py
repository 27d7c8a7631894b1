"""The view `jobs`: what RUN/jobs says of the attempts at a stage."""

import json

from relax.analytics import open_run
from relax.analytics.questions import question

JOB = {
    "step": 1,
    "stages": ["reward", "advantage"],
    "attempt": "job-1",
    "job_id": "4711",
    "state": "COMPLETED",
    "queue_s": 3.0,
    "run_s": 10.0,
    "gpus": 2,
    "gpu_s": 20.0,
    "num_nodes": 1,
    "restarts": 0,
}


def put(run, name, file, record):
    folder = run.root / "jobs" / name
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(record))


def test_stages_of_one_job_share_its_facts_and_lost_attempts_show(own_run):
    put(own_run, "000001-reward-1", "job.json", JOB)
    put(own_run, "000003-update-2", "claim.json", {"step": 3, "stages": ["score", "update"]})
    refused = {"state": "REFUSED", "reason": "invalid partition"}
    put(own_run, "000003-update-2", "outcome.json", refused)
    opened = open_run(own_run.root)
    query = "SELECT step, stage, attempt, job_id, committed, state, queue_s, gpu_s FROM jobs "
    assert opened.sql(query + "WHERE state IS NOT NULL ORDER BY ALL").fetchall() == [
        (1, "advantage", "job-1", "4711", False, "COMPLETED", 3.0, 20.0),
        (1, "reward", "job-1", "4711", True, "COMPLETED", 3.0, 20.0),
        (3, "score", "job-2", None, False, "REFUSED", None, None),
        (3, "update", "job-2", None, False, "REFUSED", None, None),
    ]


def test_a_failed_attempt_has_its_cost(own_run):
    put(own_run, "000003-update-1", "job.json", {"step": 3, "stages": ["update"], "job_id": "8"})
    ended = {"state": "TIMEOUT", "queue_s": 2.0, "run_s": 5.0, "gpu_s": 10.0, "restarts": 1}
    put(own_run, "000003-update-1", "outcome.json", ended)
    query = "SELECT job_id, state, committed, queue_s, run_s, gpu_s, restarts FROM jobs "
    found = open_run(own_run.root).sql(query + "WHERE step = 3").fetchall()
    assert found == [("8", "TIMEOUT", False, 2.0, 5.0, 10.0, 1)]


def test_cost_and_idle_share(own_run):
    put(own_run, "000001-reward-1", "job.json", {**JOB, "stages": ["reward"]})
    opened = open_run(own_run.root)
    cost = opened.sql(question("cost-per-stage").sql(1)).fetchall()
    assert cost == [("reward", 1, 2.0 * 2 / 3600, 3.0, 3.0, 0)]
    idle = opened.sql(question("idle-share").sql(1)).fetchall()
    assert idle == [(1, 2, 1, 10.0, 2.0, 0.8)]
