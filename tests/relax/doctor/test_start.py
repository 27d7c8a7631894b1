"""What keeps a run from starting is one line, the same from `train`, `--dry-run` and `check`."""

import json
import shutil

import pytest

from relax.cli import main
from relax.data.tasks import build_model, build_tokenizer
from relax.doctor.plan import plan
from relax.doctor.start import check, settled
from relax.errors import ArtifactError, ConfigError
from relax.flags import load_config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with its tokenizer, without a chat template."""
    made = tmp_path_factory.mktemp("base") / "model"
    build_tokenizer(made)
    build_model(
        made, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32,
        intermediate_size=64, seed=0,
    )  # fmt: skip
    (made / "chat_template.jinja").unlink(missing_ok=True)
    return made


@pytest.fixture
def here(tmp_path, base):
    """Settings of a run that would start."""
    shutil.copytree(base, tmp_path / "m")
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 4)
    return {
        "run_dir": str(tmp_path / "run"),
        "hf_checkpoint": str(tmp_path / "m"),
        "prompt_data": str(tmp_path / "p.jsonl"),
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "min_free_gib": 0,
    }


def told(given, command="train"):
    """The line of the one fault, which `relax check` tells, too."""
    config = load_config(None, given)
    with pytest.raises((ConfigError, ArtifactError)) as caught:
        check(config, command)
    assert str(caught.value) in plan(config).problems
    return str(caught.value)


def test_nothing_is_said_of_a_run_that_would_start(here):
    assert "prompts" in check(load_config(None, here))
    assert plan(load_config(None, here)).problems == []


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("rm_type", "exakt", "--rm-type = 'exakt': known: exact, math; did you mean exact?"),
        ("input_key", "q", "row 0: no input_key = 'q'; keys: input, label"),
        ("label_key", "a", "row 0: no label_key = 'a'; keys: input, label"),
        ("prompt_template", "no", "--prompt-template = 'no'; it must hold {input}"),
        ("rollout_max_prompt_len", 1, "--rollout-max-prompt-len = 1: drops every prompt; the sh"),
        ("rollout_max_context_len", 2, "--rollout-max-context-len = 2: leaves no room to answer"),
        ("num_replicas", 2, "--num-replicas = 2: the update has 1 rank; the number of ranks must"),
        ("apply_chat_template", True, "m has no chat template; use an instruct model"),
        ("attention", "flash_attention_2", "--attention = 'flash_attention_2': the package flash"),
        (
            "only_train_params_name_list",
            ("[",),
            "--only-train-params-name-list = '[': not a regular expression: unterminated",
        ),
        ("rollout_stop_token_ids", (99999999,), "--rollout-stop-token-ids = 99999999: no such tok"),
        ("site", "nope.toml", "--site = 'nope.toml': cannot be read: No such file"),
        ("ref_load", "/nope", "/nope: no such directory"),
        ("custom_rm_path", "none.py:f", "--custom-rm-path = 'none.py:f': no file none.py"),
    ],
)
def test_a_setting_that_the_stages_would_stumble_over(here, setting, value, said, tmp_path):
    assert said in told({**here, setting: value})
    assert not (tmp_path / "run").exists()


def test_a_budget_that_a_response_may_not_fit_into(here):
    """Told before a rollout is paid for, to the token; a count of responses has no budget."""
    limits = {"rollout_max_prompt_len": 20, "rollout_max_response_len": 30}
    fits = {**here, **limits, "max_tokens_per_gpu": 50}
    assert check(load_config(None, fits))
    assert told({**fits, "max_tokens_per_gpu": 49}) == (
        "--max-tokens-per-gpu = 49: a prompt with its response may have 50 tokens, and is never "
        "split; raise it to 50, or lower rollout_max_prompt_len = 20 or rollout_max_response_len "
        "= 30"
    )
    assert check(load_config(None, {**fits, "max_tokens_per_gpu": 9, "micro_batch_size": 1}))
    assert check(
        load_config(None, {**fits, "max_tokens_per_gpu": 40, "rollout_max_context_len": 40})
    )


def test_the_models_own_limit_bounds_a_response(here, tmp_path):
    described = json.loads((tmp_path / "m" / "config.json").read_text())
    described["max_position_embeddings"] = 45
    (tmp_path / "m" / "config.json").write_text(json.dumps(described))
    limits = {"rollout_max_prompt_len": 20, "rollout_max_response_len": 30}
    assert check(load_config(None, {**here, **limits, "max_tokens_per_gpu": 45}))
    assert "may have 45 tokens" in told({**here, **limits, "max_tokens_per_gpu": 44})


REWARDS = """
def other(text, label): return 1.0
async def later(response_text, label): return 1.0
"""


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (REWARDS, "other", "takes (text, label); (response_text, label) is needed, by these names"),
        (REWARDS, "later", "async is not supported here; write a plain `def`"),
        (REWARDS, "gone", "no function 'gone' there"),
        ("import relax_gone\n", "f", "failed: ModuleNotFoundError: No module named 'relax_gone'"),
        ("import sys; sys.exit(3)\n", "f", "failed: SystemExit: 3"),
    ],
)
def test_a_reward_that_cannot_be_called(here, tmp_path, source, name, said):
    (tmp_path / "rw.py").write_text(source)
    path = f"{tmp_path}/rw.py:{name}"
    line = told({**here, "custom_rm_path": path})
    assert line.startswith(f"--custom-rm-path = '{path}': ") and said in line


def test_a_row_without_its_label(here, tmp_path):
    with (tmp_path / "p.jsonl").open("a") as file:
        file.write('{"input": "1"}\n')
    assert "p.jsonl: row 4: no label_key = 'label'; keys: input" in told(here)


def test_weights_that_are_not_whole_or_of_another_model(here, tmp_path):
    weights, config = tmp_path / "m/model.safetensors", tmp_path / "m/config.json"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    assert f"its header says {len(data)}: truncated; copy the model again" in told(here)
    weights.write_bytes(data)
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"hidden_size": 48}))
    line = told(here)
    assert "tensor model.embed_tokens.weight has shape [64, 32]; config.json wants [64, 48]" in line
    config.write_text(json.dumps(json.loads(text) | {"num_hidden_layers": 3}))
    assert "no weights of layer 1; config.json says num_hidden_layers = 3" in told(here)
    config.write_text("{")
    assert "config.json: damaged" in told(here)


def test_a_directory_that_is_no_place_for_a_run(here, tmp_path):
    (tmp_path / "file").write_text("x")
    line = told({**here, "run_dir": str(tmp_path / "file")})
    assert line.endswith("/file': it is a file; give a directory")
    assert f"{tmp_path}/file is a file" in told({**here, "run_dir": str(tmp_path / "file/run")})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    assert "not empty and not a run" in told({**here, "run_dir": str(tmp_path / "full")})


def test_all_faults_are_told_at_once(here):
    lines = told_lines(here | {"rm_type": "x", "input_key": "q", "prompt_template": ""})
    assert len(lines) == 2


def told_lines(given):
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, given))
    return str(caught.value).splitlines()


def flags(given):
    return [w for name, v in given.items() for w in ("--" + name.replace("_", "-"), str(v))]


@pytest.mark.parametrize("command", ["train", "sft", "evaluate", "check"])
def test_a_dry_run_says_what_the_command_would(here, command, capsys, tmp_path):
    words = flags({**here, "hf_checkpoint": "nope", "prompt_data": "none"})
    dry = [] if command == "check" else ["--dry-run"]
    assert main([command, *words, *dry]) in (1, 2)
    said = capsys.readouterr()
    if command == "evaluate":
        assert (
            said.err == f"relax evaluate: {tmp_path}/run: no such run; give the --run-dir of one\n"
        )
    else:
        assert "nope: no such directory" in said.err
        assert "none: no such file or directory" in said.err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_what_the_command_needs(capsys):
    assert main(["train", "--dry-run"]) == 2
    assert "run.run_dir: not set; give --run-dir" in capsys.readouterr().err


def test_an_evaluation_needs_a_run(here, tmp_path):
    with pytest.raises(ArtifactError, match=r"run: no such run; give the --run-dir of one"):
        settled(load_config(None, here), "evaluate")
    assert not (tmp_path / "run").exists()


def test_check_ends_in_its_verdict(here, capsys):
    assert main(["check", *flags(here)]) == 0
    assert capsys.readouterr().err.endswith("would start here\n")
    assert main(["check", *flags({**here, "rm_type": "x"})]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("would not start here: --rm-type")
