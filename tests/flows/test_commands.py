"""`relax train` and `evaluate` on runs that are there: what they read, say and start."""

import shutil
from types import SimpleNamespace

import pytest
from crash_lab import flags

from flows import opening, train
from relax.cli import main
from relax.doctor.start import check
from relax.flags import load_config
from relax.store import Run
from tasks.stage import perform

pytestmark = pytest.mark.integration


def test_an_evaluation_reads_the_runs_own_settings(settings, max3, capsys):
    given = {**settings, "num_rollout": 1, "sft_steps": 2}
    assert main(["sft", *flags(given), "--no-prefect"]) == 0
    capsys.readouterr()
    words = ["--run-dir", settings["run_dir"], "--eval-prompt-data", str(max3.held_out)]
    assert main(["evaluate", *words, "--no-prefect"]) == 0
    said = capsys.readouterr().err
    assert "policy 1: sampled " in said and " greedy " in said
    assert "step " not in said
    run = Run.open(settings["run_dir"])
    assert run.config.sft.sft_steps == 2
    assert run.manifest(1, "evaluate") is not None
    # Finished: said without a server, and nothing is computed.
    assert main(["evaluate", *words]) == 0
    assert "finished already; nothing computed" in capsys.readouterr().err


def test_an_evaluation_with_another_model_is_refused(settings, max3, tmp_path, capsys):
    given = {**settings, "num_rollout": 1, "sft_steps": 1}
    assert main(["sft", *flags(given), "--no-prefect"]) == 0
    other = tmp_path / "other"
    shutil.copytree(settings["hf_checkpoint"], other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    words = ["--run-dir", settings["run_dir"], "--eval-prompt-data", str(max3.held_out)]
    assert main(["evaluate", *words, "--hf-checkpoint", str(other), "--no-prefect"]) == 2
    assert "content of model" in capsys.readouterr().err


def test_an_evaluation_of_no_run_makes_none(tmp_path, max3, capsys):
    words = ["--run-dir", str(tmp_path / "x"), "--eval-prompt-data", str(max3.held_out)]
    assert main(["evaluate", *words, "--no-prefect"]) == 1
    assert capsys.readouterr().err.endswith("x: no such run; give the --run-dir of one\n")
    assert not (tmp_path / "x").exists()


def test_a_warning_is_printed_once_and_a_finished_run_needs_no_server(settings, capsys):
    words = ["train", *flags({**settings, "num_rollout": 1, "tis_clip": 5})]
    assert main([*words, "--no-prefect"]) == 0
    assert capsys.readouterr().err.count("warning: algorithm.tis_clip = 5.0: no effect") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.server.ensure_server", lambda: pytest.fail("a server was started"))
        assert main(words) == 0
        assert "finished already; nothing computed" in capsys.readouterr().err
        assert main([*words, "--lr", "0.5"]) == 2
    assert "a run with other settings: update.lr" in capsys.readouterr().err


def test_truncated_responses_that_are_all_left_out_are_warned_of(settings, capsys):
    given = {**settings, "num_rollout": 1}
    words = ["train", *flags(given), "--rollout-ignore-eos", "--mask-truncated", "--no-prefect"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "warning: step 0: every response is truncated and left out by mask_truncated" in said


BAD = """
def reward(response_text, label):
    raise ValueError("no good")

def shape(reward_B, group_id_B, mask_BT):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("setting", "name", "line"),
    [
        ("custom_rm_path", "reward", "ValueError: no good (mine.py:3), sample 0"),
        (
            "custom_advantage_path",
            "shape",
            "custom advantage: gave list; a tensor of shape B or B, T is needed",
        ),
    ],
)
def test_a_function_of_the_users_that_fails_is_one_line_and_its_frames(
    settings, tmp_path, capsys, *, setting, name, line
):
    (tmp_path / "mine.py").write_text(BAD)
    path = f"{tmp_path}/mine.py:{name}"
    words = ["train", *flags({**settings, "num_rollout": 1, setting: path}), "--no-prefect"]
    assert main(words) == 1
    flag = "--" + setting.replace("_", "-")
    first, *frames = capsys.readouterr().err.splitlines()
    assert first == f"relax train: {flag} = '{path}': {line}"
    assert not any("relax/" in frame for frame in frames)


def test_the_cluster_is_asked_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["check", "--cluster", "--placement", "job"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("relax check: SLURM does not answer: ") and said.count("\n") == 1
    assert main(["check", "--cluster"]) == 2
    said = capsys.readouterr().err
    assert said == 'relax check: no stage has placement = "job"; give --placement job\n'


@pytest.mark.parametrize("words", [["--no-prefect"], []])
def test_prompts_and_models_are_checked_once(settings, monkeypatch, words):
    """Also where Prefect calls the flow, which has no more than its parameters."""
    calls = []

    def counting(config, command):
        calls.append(command)
        return check(config, command)

    def flow(config, overrides, return_state):
        train.run(load_config(config or None, overrides), perform)
        return SimpleNamespace(is_cancelled=lambda: False, result=lambda: None)

    monkeypatch.setattr(opening, "check", counting)
    monkeypatch.setattr("flows.server.ensure_server", lambda: None)
    monkeypatch.setattr(train, "train", flow)
    assert main(["train", *flags({**settings, "num_rollout": 1}), *words]) == 0
    assert calls == ["train"]
    assert Run.open(settings["run_dir"]).num_updates() == 1
    train.run(load_config(None, {**settings, "num_rollout": 1}), perform)
    assert calls == ["train"] * 2  # nothing is handed on to a later flow
