"""Each bad file gives its exact message; what is frozen stays frozen."""

import pytest
from pydantic import ValidationError

from relax.config import Config, flag_of, section_of, sections
from relax.errors import ConfigError
from relax.flags import load_config, require

RESPONSES = "rollout_batch_size * n_samples_per_prompt = 256"
BAD = {
    "[rollout]\nrollout_temperature = 0.0": (
        "rollout.rollout_temperature = 0.0: input should be greater than 0"
    ),
    "[rollout]\nn_samples_per_promt = 3": (
        "rollout.n_samples_per_promt: no such key; did you mean n_samples_per_prompt?"
    ),
    "[rollout]\nzzz = 3": "rollout.zzz: no such key",
    "[rollout]\nlr = 3": "rollout.lr: no such key; it belongs in [update]",
    "[rolout]\nx = 3": "[rolout]: no such section; did you mean rollout?",
    "lr = 3": "[lr]: no such section; it is a key of [update]",
    "update = 3": "update = 3: update is a section: write [update]",
    "[update]\nlr = 'x'": "update.lr = 'x': input should be a valid number",
    "[update]\nlr = '1e-5'": "update.lr = '1e-5': input should be a valid number",
    "[update]\nlr = inf": "update.lr = inf: input should be a finite number",
    "[update]\nlr_decay_style = 'cos'": (
        "update.lr_decay_style = 'cos': input should be 'constant', 'linear' or 'cosine'"
    ),
    "[update]\nadam_beta1 = 1.0": "update.adam_beta1 = 1.0: input should be less than 1",
    "[algorithm]\nuse_tis = 1": "algorithm.use_tis = 1: input should be a valid boolean",
    "[algorithm]\neps_clip_high = 'x'": (
        "algorithm.eps_clip_high = 'x': input should be a valid number"
    ),
    "[run]\nnum_rollout = 1.5": "run.num_rollout = 1.5: input should be a valid integer",
    "[rollout]\nrollout_stop_token_ids = [1, 'x']": (
        "rollout.rollout_stop_token_ids = 'x': input should be a valid integer"
    ),
    "[run\n": "not TOML: Expected ']' at the end of a table declaration (at line 1, column 5)",
    "[update]\nglobal_batch_size = 48": (
        f"{RESPONSES} is not num_steps_per_rollout * global_batch_size = 5 * 48"
    ),
    "[update]\nglobal_batch_size = 128\nnum_steps_per_rollout = 3": (
        f"{RESPONSES} is not num_steps_per_rollout * global_batch_size = 3 * 128"
    ),
    "[update]\nnum_steps_per_rollout = 3": (
        f"{RESPONSES} is not a multiple of num_steps_per_rollout = 3"
    ),
    "[update]\nglobal_batch_size = 4": (
        "global_batch_size = 4 is not a multiple of n_samples_per_prompt = 8: "
        "an optimizer step takes whole groups"
    ),
}


def fault(path, overrides=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_gives_its_exact_message(file, text):
    path = file(text)
    assert fault(path) == f"{path}: {BAD[text]}"


def test_all_faults_of_a_file_are_told_at_once(file):
    path = file("[run]\nnum_rollout = 0\nfoo = 1\n[bar]\n[update]\nlr = -1.0\n")
    assert fault(path).splitlines() == [
        f"{path}: run.foo: no such key",
        f"{path}: [bar]: no such section",
        f"{path}: run.num_rollout = 0: input should be greater than 0",
        f"{path}: update.lr = -1.0: input should be greater than 0",
    ]


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "no.toml"
    assert fault(missing) == f"{missing}: no such file; give the path of a TOML configuration"
    assert fault(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff")
    assert fault(binary).startswith(f"{binary}: not TOML: 'utf-8' codec can't decode byte 0xff")


def test_an_empty_file_is_the_defaults(file):
    assert load_config(file("")) == Config()


def test_a_file_is_read_section_by_section(file):
    config = load_config(file("[update]\nlr = 1e-5\n[rollout]\nrollout_stop = ['a', 'b']\n"))
    assert config.update.lr == 1e-5
    assert config.rollout.rollout_stop == ("a", "b")


def test_the_tree_is_frozen():
    with pytest.raises(ValidationError):
        Config().update.lr = 1.0
    with pytest.raises(ValidationError):
        Config().update = Config().update


def test_field_names_are_unique_and_documented():
    names = [name for cls in sections().values() for name in cls.model_fields]
    assert len(names) == len(set(names)) == len(section_of())
    for cls in sections().values():
        assert cls.__doc__
        for name, field in cls.model_fields.items():
            assert field.description, f"{name} is not documented"


def test_settings_that_say_where_enter_no_key():
    config = load_config(None, {"placement": "job", "run_dir": "x", "num_rollout": 7})
    assert config.placement.keyed() == Config().placement.keyed()
    assert config.run.keyed() == Config().run.keyed() == {"num_threads": 1}
    assert load_config(None, {"lr": 1.0}).update.keyed() != Config().update.keyed()


def test_micro_batches_are_packed_unless_a_count_is_given():
    assert Config().update.use_dynamic_batch_size
    counted = load_config(None, {"micro_batch_size": "4"})
    assert not counted.update.use_dynamic_batch_size
    assert Config.model_validate(counted.model_dump()) == counted
    said = {"use_dynamic_batch_size": "off"}, "micro_batch_size = 0 with use_dynamic_batch_size = F"
    both = {"use_dynamic_batch_size": "on", "micro_batch_size": 2}
    for given, line in (said, (both, "micro_batch_size = 2 with use_dynamic_batch_size = True: ")):
        with pytest.raises(ConfigError, match=line):
            load_config(None, given)


def test_what_is_trained_is_named_in_one_way():
    given = {"only_train_params_name_list": ("a",), "freeze_params_name_list": ("b",)}
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert str(caught.value) == (
        "settings: freeze_params_name_list = ['b'] with only_train_params_name_list = ['a']: give "
        "at most one of the two"
    )


def test_batch_arithmetic():
    config = load_config(None, {"rollout_batch_size": 4, "n_samples_per_prompt": 6})
    assert (config.responses_per_rollout, config.optimizer_steps) == (24, 1)
    fourths = {"rollout_batch_size": 4, "n_samples_per_prompt": 6, "global_batch_size": 6}
    assert load_config(None, fourths).optimizer_steps == 4
    halves = {"rollout_batch_size": 4, "n_samples_per_prompt": 6, "num_steps_per_rollout": 2}
    assert load_config(None, halves).optimizer_steps == 2


def test_a_stage_without_a_placement_of_its_own_has_the_general_one():
    config = load_config(None, {"placement": "job", "reward_placement": "inline"})
    found = {s: config.placement_of(s) for s in ("rollout", "reward", "evaluate", "sft", "score")}
    assert found == {
        "rollout": "job",
        "reward": "inline",
        "evaluate": "job",
        "sft": "job",
        "score": "job",
    }


def test_what_is_required_is_told_with_flag_and_key():
    with pytest.raises(ConfigError) as caught:
        require(Config(), "run_dir", "prompt_data")
    assert str(caught.value).splitlines() == [
        "run.run_dir: not set; give --run-dir or [run] run_dir in the TOML file",
        "data.prompt_data: not set; give --prompt-data or [data] prompt_data in the TOML file",
    ]


def test_flag_names():
    assert flag_of("lr_warmup_iters") == "--lr-warmup-iters"
