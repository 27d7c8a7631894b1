"""Flags: precedence, conversion, faults at once, help, nearest names."""

import pytest

from relax.config import flag_of, section_of, sections
from relax.errors import ConfigError
from relax.flags import build_parser, load_config, nearest, overrides_of
from relax.flags import parse_flags as parse


@pytest.fixture(scope="module")
def parser():
    return build_parser("relax train", "Train.", "relax train x.toml")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[update]\nlr = 1e-4\nclip_grad = 0.5\n")
    return str(path)


def config_of(*words):
    known = parse(build_parser("relax train", "Train."), words)
    return load_config(known.config, overrides_of(known))


def fault(*words):
    with pytest.raises(ConfigError) as caught:
        config_of(*words)
    return str(caught.value)


def test_a_flag_beats_the_file_and_the_file_the_default(recipe):
    update = config_of(recipe, "--lr", "3e-4").update
    assert (update.lr, update.clip_grad, update.adam_beta1) == (3e-4, 0.5, 0.9)


def test_a_flag_given_with_its_default_value_still_beats_the_file(recipe):
    assert config_of(recipe, "--clip-grad", "1.0").update.clip_grad == 1.0


def test_every_field_has_a_flag_and_no_flag_is_without_a_field(parser):
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag_of(name) for name in section_of()} <= flags
    names = {flag_of(name) for name in section_of()}
    assert {f for f in flags if f not in names and not f.startswith("--no-")} == {"-h", "--help"}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--lr", "3e-4"], "lr", 3e-4),
        (["--lr=3e-4"], "lr", 3e-4),
        (["--num-rollout", "7"], "num_rollout", 7),
        (["--use-tis"], "use_tis", True),
        (["--no-rollout-shuffle"], "rollout_shuffle", False),
        (["--eps-clip-high", "0.3"], "eps_clip_high", 0.3),
        (["--rollout-stop", "a", "b"], "rollout_stop", ("a", "b")),
        (["--rollout-stop-token-ids", "1", "2"], "rollout_stop_token_ids", (1, 2)),
        (["--lr-decay-style", "cosine"], "lr_decay_style", "cosine"),
        (["--prompt-template", "{input}!"], "prompt_template", "{input}!"),
    ],
)
def test_texts_become_the_fields_type(words, field, value):
    assert getattr(getattr(config_of(*words), section_of()[field]), field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lrr", "3"], "--lrr: no such flag; did you mean --lr?"),
        (["--run-di", "x"], "--run-di: no such flag; did you mean --run-dir?"),
        (["a.toml", "b.toml"], "b.toml: not expected here"),
        (["--lr"], "argument --lr: expected one argument; see relax train --help"),
        (
            ["--lr", "x"],
            "--lr = 'x': input should be a valid number, unable to parse string as a number",
        ),
        (["--lr", "nan"], "--lr = 'nan': input should be a finite number"),
        (["--num-rollout", "0"], "--num-rollout = '0': input should be greater than 0"),
        (
            ["--rollout-engine", "sglang"],
            "--rollout-engine = 'sglang': input should be 'transformers', 'vllm' or 'external'",
        ),
    ],
)
def test_a_bad_flag_gives_its_exact_message(words, message):
    assert fault(*words) == message


def test_all_faults_of_file_and_flags_are_told_at_once(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[update]\nlr_decay_style = 'cos'\nfoo = 1\n")
    assert fault(str(path), "--lr", "x", "--num-rollout", "0").splitlines() == [
        f"{path}: update.foo: no such key",
        "--lr = 'x': input should be a valid number, unable to parse string as a number",
        "--num-rollout = '0': input should be greater than 0",
        f"{path}: update.lr_decay_style = 'cos': input should be 'constant', 'linear' or 'cosine'",
    ]


def test_overrides_by_name_are_converted_and_checked_too():
    assert load_config(None, {"use_tis": "yes"}).algorithm.use_tis is True
    with pytest.raises(ConfigError, match=r"--lrr: no such setting; did you mean lr\?"):
        load_config(None, {"lrr": "1"})


def test_only_flags_that_were_given_are_overrides(parser, recipe):
    assert overrides_of(parse(parser, [recipe, "--lr", "1"])) == {"lr": "1"}


def test_help_is_grouped_by_section_and_says_default_and_meaning(parser):
    shown = parser.format_help()
    places = [shown.index(f"[{name}]:") for name in sections()]
    assert places == sorted(places)
    assert "Peak learning rate. [1e-06]" in shown
    assert "Upper clip margin; unset: the same as eps_clip. [unset]" in " ".join(shown.split())
    assert shown.rstrip().endswith("example: relax train x.toml")
    assert max(len(line) for line in shown.splitlines()) <= 110


def test_abbreviations_are_not_guessed():
    assert fault("--num-roll", "3").startswith("--num-roll: no such flag; did you mean --num-roll")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("grppo", "; did you mean grpo?"), ("xyz", ""), ("gsppo", "; did you mean gspo?")],
)
def test_nearest(word, hint):
    assert nearest(word, ["grpo", "gspo", "rloo"]) == hint


def test_an_allocation_that_is_not_there_is_told_without_the_whole_section():
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"rollout_allocation": "gpux"})
    assert str(caught.value) == (
        "settings: slurm.rollout_allocation = 'gpux': no such allocation; "
        "[slurm.allocations] has: none"
    )


def test_rules_for_several_settings_are_all_told_with_faulty_fields(tmp_path):
    path = tmp_path / "bad.toml"
    together = [
        f"{path}: over_sampling_batch_size = 4 without dynamic_sampling_filter_path: nothing would "
        "be left out",
        f"{path}: rollout_min_tokens = 999 is more than rollout_max_response_len = 256",
        f"{path}: rollout_batch_size * n_samples_per_prompt = 256 is not num_steps_per_rollout * "
        "global_batch_size = 5 * 48",
    ]
    broken = (
        "[rollout]\nover_sampling_batch_size = 4\nrollout_min_tokens = 999\n"
        "[update]\nglobal_batch_size = 48\n"
    )
    path.write_text(broken)
    assert fault(str(path)).splitlines() == together
    path.write_text(broken + "lr = 'x'\n[slurm]\nrollout_allocation = 'a'\n")
    assert fault(str(path), "--clip-grad", "y").splitlines() == [
        "--clip-grad = 'y': input should be a valid number, unable to parse string as a number",
        f"{path}: slurm.rollout_allocation = 'a': no such allocation; [slurm.allocations] has: "
        "none",
        f"{path}: update.lr = 'x': input should be a valid number",
        *together,
    ]
    # What does not fit a setting that is faulty itself says nothing.
    path.write_text(broken.replace("[update]", "rollout_batch_size = 'x'\n[update]"))
    assert fault(str(path), "--rollout-max-response-len", "0").splitlines() == [
        "--rollout-max-response-len = '0': input should be greater than 0",
        f"{path}: rollout.rollout_batch_size = 'x': input should be a valid integer",
        together[0],
    ]


def test_faults_of_an_allocation_are_told_by_their_place(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        "[slurm]\nupdate_allocation = 'gpu'\n"
        "[slurm.allocations.gpu]\ngpu_per_node = 1\nnodes = 'x'\nextra = {a = 1.5}\n"
        "[slurm.allocations.cpu]\nzzz = 1\n"
    )
    assert fault(str(path)).splitlines() == [
        f"{path}: slurm.allocations.gpu.gpu_per_node: no such key; did you mean gpus_per_node?",
        f"{path}: slurm.allocations.cpu.zzz: no such key",
        f"{path}: slurm.allocations.gpu.nodes = 'x': input should be a valid integer",
        f"{path}: slurm.allocations.gpu.extra.a = 1.5: input should be a valid string or input "
        "should be a valid integer",
    ]
    assert fault("--allocations", '{"gpu": {"gpu_per_node": 1, "nodes": 0}}').splitlines() == [
        "--allocations: slurm.allocations.gpu.gpu_per_node: no such key; did you mean "
        "gpus_per_node?",
        "--allocations: slurm.allocations.gpu.nodes = 0: input should be greater than 0",
    ]


def test_all_allocations_that_are_not_there_are_told():
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"rollout_allocation": "a", "update_allocation": "b"})
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == [
        " slurm.rollout_allocation = 'a'",
        " slurm.update_allocation = 'b'",
    ]


def test_a_name_of_an_evaluation_is_plain():
    with pytest.raises(ConfigError, match="only letters, digits, `_`,"):
        load_config(None, {"eval_name": "a/b c"})
