import math

import pytest

import relax
from relax.analytics.views import SAFE, open_run
from relax.errors import ArtifactError, ConfigError
from relax.schema import VIEWS


@pytest.fixture(scope="module")
def opened(run):
    return open_run(run.root)


def asked(opened, query):
    return opened.sql(query).fetchall()


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_documented_columns(opened, view):
    found = [row[0] for row in asked(opened, f"DESCRIBE {view}")]
    assert found == [column.name for column in VIEWS[view].columns]
    assert all(column.meaning for column in VIEWS[view].columns)


def test_steps(opened):
    query = "SELECT step, responses, tokens, raw_reward, reward, response_len, truncated, logp"
    assert asked(opened, query + " FROM steps ORDER BY step") == [
        (0, 4, 10, 0.25, 0.5, 2.5, 0.25, -1.0),
        (1, 4, 8, 0.75, 1.5, 2.0, 0.0, -1.0),
        (2, 4, 8, 0.0, 0.0, 2.0, 0.25, -1.0),
    ]


def test_groups(opened):
    query = "SELECT step, prompt_id, label, reward_min, reward_max, has_signal FROM groups"
    assert asked(opened, query + " ORDER BY ALL") == [
        (0, 0, "1", 0.0, 2.0, True),
        (0, 1, "2", 0.0, 0.0, False),
        (1, 2, "3", 2.0, 2.0, False),
        (1, 3, "4", 0.0, 2.0, True),
        (2, 0, "1", 0.0, 0.0, False),
        (2, 1, "2", 0.0, 0.0, False),
    ]


def test_tables_in_another_order_or_with_rows_missing_are_joined_by_their_key(opened):
    query = "SELECT sample_id, advantage FROM responses WHERE step = 1 ORDER BY ALL"
    assert asked(opened, query) == [
        (1_000_000, -1.0),
        (1_000_001, None),
        (1_000_002, 1.0),
        (1_000_003, 2.0),
    ]


def test_what_a_stage_has_not_made_yet_is_null(opened):
    query = "SELECT step, count(old_logp), count(advantage), count(ref_logp) FROM responses"
    assert asked(opened, query + " GROUP BY 1 ORDER BY 1") == [
        (0, 0, 4, 0),
        (1, 4, 3, 0),
        (2, 0, 0, 0),
    ]


def test_jobs_are_attempts_from_manifests_and_submissions(opened):
    query = "SELECT step, stage, attempt, job_id, committed, host, seconds FROM jobs "
    assert asked(opened, query + "WHERE attempt LIKE 'job-%' ORDER BY ALL") == [
        (1, "reward", "job-1", "77", True, "here", 2.0),
        (2, "advantage", "job-1", None, False, None, None),
    ]
    (started,) = asked(opened, "SELECT epoch(started) FROM jobs WHERE step = 1 LIMIT 1")[0]
    assert started == 1_700_000_001


def test_metrics_and_timing_know_their_step_and_stage(opened):
    assert asked(opened, "SELECT step, stage, metric, value FROM metrics ORDER BY ALL LIMIT 1") == [
        (0, "update", "train/grad_norm", 2.0)
    ]
    query = "SELECT step, stage, value FROM timing WHERE measure = 'seconds/total' ORDER BY ALL"
    assert asked(opened, query)[0] == (0, "advantage", 2.0)


def test_several_runs_differ_in_the_column_run(run, own_run):
    both = relax.open_run(run.root, own_run.root)
    query = "SELECT run, count(*) FROM responses GROUP BY ALL ORDER BY ALL"
    assert asked(both, query) == [("own", 12), ("small", 12)]


def test_two_runs_of_one_name_are_told_apart_by_their_paths(run):
    both = open_run(run.root, run.root)
    (names,) = asked(both, "SELECT list(DISTINCT run) FROM steps")[0]
    assert names == [str(run.root)]


def test_a_run_that_has_just_begun_answers_with_no_rows(tmp_path):
    from relax.flags import load_config
    from relax.store import Run

    config = load_config(None, {"run_dir": str(tmp_path / "new")})
    Run.start(config, {}, {"schedule_steps": 1, "command": ""})
    opened = open_run(tmp_path / "new")
    for view in VIEWS:
        assert asked(opened, f"SELECT * FROM {view}") == []


def test_lists_are_lists_of_numbers(opened):
    (tokens, logp) = asked(
        opened, "SELECT tokens, rollout_logp FROM responses WHERE sample_id = 2"
    )[0]
    assert tokens == [10, 11, 12]
    assert all(math.isclose(x, -1.0) for x in logp)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "SELECT rewrd FROM steps",
            "rewrd: no such column; did you mean reward?; steps has run, step, policy_version, "
            "responses, tokens, raw_reward, reward, response_len, truncated, logp",
        ),
        (
            "SELECT s.foo FROM steps s",
            "foo: no such column; steps has run, step, policy_version, responses, tokens, "
            "raw_reward, reward, response_len, truncated, logp",
        ),
        (
            "SELECT * FROM respnses",
            "respnses: no such view; did you mean responses?; views: responses, groups, steps, "
            "metrics, timing, prompts, candidates, evals, jobs",
        ),
        ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'),
    ],
)
def test_a_wrong_query_is_one_line_that_lists_what_is_valid(opened, query, message):
    with pytest.raises(ConfigError) as caught:
        opened.sql(query)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{path}'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "ATTACH '{path}'",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "SELECT * FROM opened",
    ],
)
def test_files_and_settings_are_out_of_reach(opened, query, tmp_path):
    path = tmp_path / "out"
    with pytest.raises(ConfigError):
        opened.sql(query.format(path=path))
    assert not path.exists()


def test_the_locks_are_duckdbs_own():
    assert "enable_external_access = false" in SAFE
    assert "lock_configuration = true" in SAFE


def test_not_a_run(tmp_path):
    with pytest.raises(ArtifactError, match=r"run.json: missing; give the directory of a run"):
        open_run(tmp_path)
    with pytest.raises(ConfigError, match="no run given"):
        open_run()
