"""A run directory: settings it accepts and refuses, what it reads, and what it keeps."""

import json

import pytest
from store_cases import SOURCES, attempt, config_of, metrics, names, start, update

from relax.errors import ArtifactError, ConfigError
from relax.store import Run
from relax.store.arrow import write_table


def begun(root, *stages, **settings):
    """A run with some committed stages of its first step (default: up to the update)."""
    start(root, **settings)
    for stage in stages or ("rollout", "score", "update"):
        attempt(root, "a", stage=stage, value=1.0).commit()
    return Run.open(root)


# --- settings ------------------------------------------------------------------------------------


def test_a_new_run_records_its_settings(tmp_path):
    run = start(tmp_path / "run", lr=1e-4)
    assert names(run.root) == ["config", "run.json"]
    assert names(run.root / "config") == ["0001.json"]
    assert run.config == config_of(tmp_path / "run", lr=1e-4)
    assert run.sources == SOURCES
    assert run.schedule_steps == 10


def test_the_same_settings_change_nothing(tmp_path):
    begun(tmp_path, lr=1e-4)
    before = (tmp_path / "run.json").read_bytes()
    start(tmp_path, lr=1e-4)
    assert names(tmp_path / "config") == ["0001.json"]
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_setting_that_changes_no_artifact_is_accepted_and_recorded(tmp_path):
    begun(tmp_path, num_rollout=10)
    run = start(tmp_path, num_rollout=20, schedule_steps=20)
    assert run.config.run.num_rollout == 20
    assert run.schedule_steps == 10, "the length of the decay is frozen"
    assert names(tmp_path / "config") == ["0001.json", "0002.json"]
    record = json.loads((tmp_path / "config" / "0002.json").read_text())
    assert record["config"]["run"]["num_rollout"] == 20
    assert json.loads((tmp_path / "config/0001.json").read_text())["config"]["run"][
        "num_rollout"
    ] == (10)


def test_another_lr_is_refused_by_name(tmp_path):
    begun(tmp_path, lr=1e-4)
    said = "a run with other settings: update.lr: 0.0001 -> 0.001; give the settings"
    with pytest.raises(ConfigError, match=said):
        start(tmp_path, lr=1e-3)
    assert names(tmp_path / "config") == ["0001.json"]


def test_all_changes_are_named_and_only_those_that_count(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError) as refused:
        start(tmp_path, lr=1e-3, rollout_batch_size=4, num_rollout=7)
    assert "rollout.rollout_batch_size: 32 -> 4; update.lr: 1e-06 -> 0.001" in str(refused.value)
    assert "num_rollout" not in str(refused.value)


def test_other_prompts_under_the_same_name_are_refused(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError, match='content of prompts: "p" -> "other"'):
        start(tmp_path, sources={**SOURCES, "prompts": "other"})


def test_an_evaluation_may_be_added_and_left_out(tmp_path):
    begun(tmp_path)
    more = {**SOURCES, "eval_prompts": "e"}
    assert start(tmp_path, sources=more, eval_prompt_data="x").sources == more
    assert start(tmp_path).sources == more
    attempt(tmp_path, "e", stage="evaluate").commit()
    assert start(tmp_path).sources == more
    with pytest.raises(ConfigError, match='content of eval_prompts: "e" -> "f"'):
        start(tmp_path, sources={**SOURCES, "eval_prompts": "f"}, eval_prompt_data="x")


def test_another_source_is_refused(tmp_path):
    begun(tmp_path)
    with pytest.raises(ConfigError, match='content of reference: null -> "r"'):
        start(tmp_path, sources={**SOURCES, "reference": "r"})


def test_until_something_is_committed_any_settings_are_accepted(tmp_path):
    """A first attempt that failed has not to be deleted by hand."""
    start(tmp_path, lr=1e-4)
    attempt(tmp_path, "killed")
    run = start(tmp_path, sources={**SOURCES, "model": "other"}, schedule_steps=5, lr=1e-3)
    assert run.config.update.lr == 1e-3
    assert run.sources["model"] == "other"
    assert run.schedule_steps == 5
    assert names(tmp_path / "config") == ["0001.json", "0002.json"]
    assert start(tmp_path, sources=run.sources, schedule_steps=6, lr=1e-3).schedule_steps == 6


def test_a_setting_may_change_until_something_made_with_it_is_committed(tmp_path):
    """A verifier that failed is put right without sampling again."""
    begun(tmp_path, "rollout", rm_type="exact")
    other = {**SOURCES, "custom_rm_path": "mended"}
    run = start(tmp_path, sources=other, rm_type="math", lr=1e-3, schedule_steps=7)
    assert (run.config.reward.rm_type, run.config.update.lr) == ("math", 1e-3)
    assert run.sources == other
    assert run.schedule_steps == 7
    attempt(tmp_path, "r", stage="reward").commit()
    for change, said in (
        ({"rm_type": "exact"}, 'reward.rm_type: "math" -> "exact"'),
        ({"sources": SOURCES}, 'content of custom_rm_path: "mended" -> null'),
    ):
        with pytest.raises(ConfigError, match=said):
            start(tmp_path, **{"sources": other, "rm_type": "math", **change})
    assert start(tmp_path, sources=other, rm_type="math", lr=2e-3).config.update.lr == 2e-3
    with pytest.raises(ConfigError, match=r"rollout\.rollout_temperature: 1\.0 -> 0\.5"):
        start(tmp_path, sources=other, rm_type="math", rollout_temperature=0.5)
    with pytest.raises(ConfigError, match='content of model: "m" -> "x"'):
        start(tmp_path, sources={**other, "model": "x"}, rm_type="math")


def test_a_filter_may_be_mended_but_not_added_once_something_is_committed(tmp_path):
    """It decides which stages a step has."""
    name = "dynamic_sampling_filter_path"
    start(tmp_path / "new")
    Run.check(config_of(tmp_path / "new"), {**SOURCES, name: "one"})
    begun(tmp_path / "plain", "rollout")
    with pytest.raises(ConfigError, match=f'content of {name}: null -> "one"'):
        Run.check(config_of(tmp_path / "plain"), {**SOURCES, name: "one"})
    start(tmp_path / "dynamic", sources={**SOURCES, name: "one"})
    attempt(tmp_path / "dynamic", "a").commit()
    Run.check(config_of(tmp_path / "dynamic"), {**SOURCES, name: "two"})


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"run.run_dir = .*: not empty and not a run; give"):
        start(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_what_a_killed_creation_left_is_no_hindrance(tmp_path):
    for name in ("config", "lease"):
        (tmp_path / name).mkdir()
    for name in (".run.json", "config/.0001.json", "config/0001.json", "lease/.here-7"):
        (tmp_path / name).write_text("{")
    assert start(tmp_path, lr=1e-4).config.update.lr == 1e-4


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ArtifactError, match=r"run.json: missing; give the directory of a run"):
        Run.open(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "config/0001.json"])
def test_a_torn_record_is_told(tmp_path, name):
    start(tmp_path)
    path = tmp_path / name
    path.write_text(path.read_text()[:-10])
    with pytest.raises(ArtifactError, match=rf"{name}: damaged"):
        Run.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["config"]["update"].update(of_another_version=1),
        lambda record: record.pop("sources"),
        lambda record: record.update(config=[]),
    ],
)
def test_the_settings_of_another_version_are_told_in_one_line(tmp_path, change):
    start(tmp_path)
    path = tmp_path / "config" / "0001.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    said = r"0001.json: not the settings of a run of this version: .+"
    with pytest.raises(ArtifactError, match=said) as told:
        Run.open(tmp_path)
    assert "\n" not in str(told.value)


# --- what it reads -------------------------------------------------------------------------------


def test_a_table_is_checked_against_its_manifest(tmp_path):
    run = begun(tmp_path)
    assert run.table(0, "rollout", "metrics").equals(metrics(1.0))


def test_a_table_of_the_same_size_with_other_values_is_refused(tmp_path):
    begun(tmp_path)
    path = tmp_path / "steps/000000/rollout/metrics.arrow"
    size = path.stat().st_size
    write_table(path, metrics(2.0))
    assert path.stat().st_size == size
    with pytest.raises(ArtifactError, match=r"metrics.arrow: content differs from its manifest"):
        Run.open(tmp_path).table(0, "rollout", "metrics")


def test_every_flipped_byte_of_a_column_is_found(tmp_path):
    begun(tmp_path)
    path = tmp_path / "steps/000000/rollout/metrics.arrow"
    data = bytearray(path.read_bytes())
    place = data.index(b"\x00\x00\x00\x00\x00\x00\xf0\x3f")  # the value 1.0
    for offset in range(8):
        flipped = bytearray(data)
        flipped[place + offset] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError, match="content differs from its manifest"):
            Run.open(tmp_path).table(0, "rollout", "metrics")


def test_what_is_not_committed_is_told(tmp_path):
    run = start(tmp_path)
    with pytest.raises(ArtifactError, match="steps/000003/reward: not committed"):
        run.table(3, "reward", "rewards")


def test_stages_are_given_by_step_with_their_directories(tmp_path):
    start(tmp_path)
    for step, stage in ((10, "rollout"), (2, "reward"), (2, "evaluate")):
        attempt(tmp_path, "a", step=step, stage=stage).commit()
    (tmp_path / "steps" / "000011" / ".staging-rollout-a").mkdir(parents=True)
    run = Run.open(tmp_path)
    steps = tmp_path / "steps"
    assert list(run.stages()) == [
        (2, "evaluate", steps / "000002" / "evaluate"),
        (2, "reward", steps / "000002" / "reward"),
        (10, "rollout", steps / "000010" / "rollout"),
    ]
    assert [name for _, name, _ in run.stages(10)] == ["rollout"]
    assert list(run.stages(3)) == []


def test_policies_are_found_through_manifests(tmp_path):
    run = start(tmp_path)
    (tmp_path / "policies/000001.of-nobody").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="policy 1 does not exist; no update published it"):
        run.policy_dir(1)
    update(tmp_path, 0, "b")
    assert run.policy_dir(1) == tmp_path / "policies/000001.b"
    assert run.policy_hash(1) == "hash of policy 1"
    assert (str(run.policy_dir(0)), run.policy_hash(0)) == ("base", "m")
    assert run.num_updates() == 1


def test_a_truncated_policy_is_told_with_both_sizes(tmp_path):
    run = start(tmp_path)
    update(tmp_path, 0)
    (tmp_path / "policies/000001.a/weights").write_text("pol")
    with pytest.raises(ArtifactError, match=r"000001.a: 3 bytes, its manifest says 8:"):
        run.policy_dir(1)


# --- what it keeps -------------------------------------------------------------------------------


def updates(root, count, *, every=1):
    run = Run.open(root)
    for step in range(count):
        run.tidy(update(root, step, checkpoint=(step + 1) % every == 0))
    return run


def versions(folder):
    return [int(name[:6]) for name in names(folder)]


@pytest.mark.parametrize(
    ("keep", "every", "checkpoints", "policies"),
    [
        (1, 1, [5], [4, 5]),
        (2, 1, [4, 5], [4, 5]),
        (2, 2, [2, 4], [2, 4, 5]),
        (9, 2, [2, 4], [2, 4, 5]),
        (2, 9, [], [4, 5]),
    ],
)
def test_retention(tmp_path, keep, every, checkpoints, policies):
    """The newest checkpoints, their policies, and the two newest policies."""
    start(tmp_path, max_actor_ckpt_to_keep=keep)
    updates(tmp_path, 5, every=every)
    assert versions(tmp_path / "checkpoints") == checkpoints
    assert versions(tmp_path / "policies") == policies


def test_a_truncated_checkpoint_does_not_count_among_those_kept(tmp_path):
    start(tmp_path, max_actor_ckpt_to_keep=2)
    run = updates(tmp_path, 2)
    (tmp_path / "checkpoints/000002.a/weights").write_text("che")
    run.tidy(update(tmp_path, 2))
    assert versions(tmp_path / "checkpoints") == [1, 3]


def test_checkpoints_are_given_newest_first_whole_or_not(tmp_path):
    start(tmp_path, max_actor_ckpt_to_keep=3)
    run = updates(tmp_path, 3)
    (tmp_path / "checkpoints/000003.a/weights").write_text("che")
    assert [version for version, _, _ in run.checkpoints(3)] == [3, 2, 1]
    assert [version for version, _, _ in run.checkpoints(2)] == [2, 1]


def test_the_next_flow_tidies_what_a_killed_one_left(tmp_path):
    start(tmp_path, max_actor_ckpt_to_keep=1)
    updates(tmp_path, 2)
    attempt(tmp_path, "killed", step=2, stage="update")
    (tmp_path / "policies/.staging-000003.killed").mkdir()
    update(tmp_path, 2, "b")  # and killed before tidy
    start(tmp_path, max_actor_ckpt_to_keep=1)
    assert versions(tmp_path / "checkpoints") == [3]
    assert names(tmp_path / "policies") == ["000002.a", "000003.b"]
    assert names(tmp_path / "steps/000002") == ["update"]
