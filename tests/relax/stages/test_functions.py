"""The user's own functions: one table, and the source that a run began with."""

import os
import pickle

import pytest

from relax.custom import identity
from relax.doctor.settings import checked
from relax.doctor.sources import fingerprints
from relax.engines.calculator import generate
from relax.errors import ConfigError
from relax.flags import load_config
from relax.stages import STAGES, functions, round_row
from relax.stages.filters import reward_spread
from relax.stages.functions import FUNCTIONS, loaded, named
from tasks.code import code_dir, snapshot

LENGTH = "def length(response_text, label):\n    return len(response_text)\n"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LENGTH)
    return path


def settings(mine, setting="custom_rm_path", name="length"):
    return load_config(None, {setting: f"{mine}:{name}"})


def known(config):
    return fingerprints(config, FUNCTIONS)


def test_the_stages_read_every_function_and_the_table_says_which_calls_it():
    rows = {**STAGES, "reward": round_row("reward.1")}
    for setting, row in FUNCTIONS.items():
        assert setting in rows[row.stage].sources
    paths = {n for row in rows.values() for n in row.sources if n.endswith("_path")}
    assert paths == FUNCTIONS.keys()


def test_a_file_that_changed_since_the_run_began_is_refused(mine):
    config = settings(mine)
    sources = known(config)
    assert loaded(config, "custom_rm_path", sources)("abc", "") == 3
    mine.write_text(LENGTH.replace("len(response_text)", "7"))
    with pytest.raises(ConfigError) as caught:
        loaded(config, "custom_rm_path", sources)
    assert str(caught.value) == (
        f"--custom-rm-path = '{mine}:length': {mine} changed since the run began; put it back as "
        "it was, or give another --run-dir"
    )
    mine.write_text(LENGTH)
    assert loaded(config, "custom_rm_path", sources)("abc", "") == 3


def test_a_module_that_changed_since_the_run_began_is_refused(tmp_path, monkeypatch):
    (tmp_path / "relax_test_rewards.py").write_text(LENGTH)
    monkeypatch.syspath_prepend(tmp_path)
    config = settings("relax_test_rewards")
    sources = known(config)
    assert loaded(config, "custom_rm_path", sources)("abc", "") == 3
    (tmp_path / "relax_test_rewards.py").write_text(LENGTH + "\n")
    with pytest.raises(ConfigError, match=r"relax_test_rewards\.py changed since the run began"):
        loaded(config, "custom_rm_path", sources)


def test_another_process_takes_the_same_source(mine):
    config = settings(mine)
    sent = pickle.loads(pickle.dumps(named(config, "custom_rm_path", known(config))))
    assert sent.load()("abc", "") == 3
    mine.write_text(LENGTH + "\n")
    with pytest.raises(ConfigError, match="changed since the run began"):
        sent.load()


def test_a_job_takes_the_copy_whatever_becomes_of_the_file(mine, tmp_path, monkeypatch):
    mine.write_text(LENGTH + "def place(response_text, label):\n    return __file__\n")
    config = settings(mine, name="place")
    sources = known(config)
    copy = snapshot(run_of(config, tmp_path / "run"))
    mine.unlink()
    monkeypatch.setattr(functions, "CODE", copy)
    place = loaded(config, "custom_rm_path", sources)
    assert place("", "") == str(mine)  # what lies beside the file is found there
    (copy / "custom/custom_rm_path/mine.py").write_text("")
    with pytest.raises(ConfigError, match="changed since the run began"):
        loaded(config, "custom_rm_path", sources)


def run_of(config, root):
    from types import SimpleNamespace

    return SimpleNamespace(config=config, root=root)


def test_every_function_is_copied_under_its_setting(tmp_path):
    given = {}
    for number, setting in enumerate(FUNCTIONS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"# {setting}\n")
        given[setting] = f"{tmp_path}/{number}/mine.py:f"
    config = load_config(None, given)
    copy = snapshot(run_of(config, tmp_path / "run"))
    assert {
        setting: (copy / "custom" / setting / "mine.py").read_text() for setting in FUNCTIONS
    } == {setting: f"# {setting}\n" for setting in FUNCTIONS}
    (tmp_path / "0" / "mine.py").write_text("# another\n")
    assert code_dir(tmp_path / "run", config) != copy
    assert len(os.listdir(tmp_path / "run/code")) == 1


def test_what_can_be_named(mine):
    ours = load_config(None, {"dynamic_sampling_filter_path": "reward_spread"})
    assert loaded(ours, "dynamic_sampling_filter_path", {}) is reward_spread
    assert known(ours)["dynamic_sampling_filter_path"] == "reward_spread"
    example = load_config(
        None, {"custom_generate_function_path": "relax.engines.calculator:generate"}
    )
    assert loaded(example, "custom_generate_function_path", known(example)) is generate
    assert loaded(example, "custom_rm_path", {}) is None
    assert known(example)["custom_rm_path"] == ""
    own = known(settings(mine))["custom_rm_path"]
    assert own == identity(f"{mine}:length", flag="") and own.endswith(":length")


def test_functions_that_cannot_be_used_are_told_at_once(mine):
    mine.write_text(
        "async def later(response_text, label): ...\ndef plain(conversation): ...\n"
        "async def other(talk): ...\ndef score(text, label): ...\n"
    )
    faults = {
        "custom_rm_path": (f"{mine}:later", "async is not supported here; write a plain `def`"),
        "custom_generate_function_path": (f"{mine}:plain", "not an async function; write `async"),
        "dynamic_sampling_filter_path": ("reward_spred", "; did you mean reward_spread?; or "),
        "custom_loss_path": (f"{mine}:score", "takes (text, label); (logp_BT, old_logp_BT, adv"),
    }
    with pytest.raises(ConfigError) as caught:
        checked(load_config(None, {setting: path for setting, (path, _) in faults.items()}))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(faults)
    for setting, (path, said) in faults.items():
        start = f"--{setting.replace('_', '-')} = {path!r}: "
        assert [line for line in lines if line.startswith(start) and said in line], lines
