import json
import os
import shutil

import numpy as np
import pytest

from relax.analytics.sample import pieces, sample, shade, token_values
from relax.analytics.show import _place, folded, step_states
from relax.cli import main
from relax.errors import ConfigError
from relax.sizes import in_bytes
from relax.store import disk


def test_the_state_of_every_stage(run):
    states = step_states(run)
    assert [s.step for s in states] == [0, 1, 2]
    assert states[0].stages == dict.fromkeys(
        ("rollout", "reward", "advantage", "update", "evaluate"), "committed"
    )
    assert states[2].stages == {
        "rollout": "committed",
        "reward": "committed",
        "advantage": "unfinished",
    }
    assert states[0].policy is None


def test_a_damaged_table_is_a_state(own_run):
    path = own_run.root / "steps" / "000001" / "rollout" / "responses.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    from relax.store import Run

    assert step_states(Run.open(own_run.root))[1].stages["rollout"] == "damaged"


def test_a_checkpoint_that_retention_removes_meanwhile(own_run, capsys, monkeypatch):
    checkpoint = own_run.root / "checkpoints" / "000001.a"
    checkpoint.mkdir(parents=True)
    for name in ("one", "two"):
        (checkpoint / name).write_bytes(bytes(2048))
    walk = os.walk

    def removed(folder):
        found = list(walk(folder))
        if folder.name == "checkpoints":
            shutil.rmtree(checkpoint)
        return found

    monkeypatch.setattr(disk.os, "walk", removed)
    assert main(["show", str(own_run.root)]) == 0
    assert not checkpoint.exists()
    assert "checkpoints 0 B" in capsys.readouterr().out


def test_alike_neighbours_are_one_line(run):
    assert [[s.step for s in group] for group in folded(step_states(run))] == [[0], [1], [2]]


def test_show_prints_and_speaks_json(run, capsys):
    assert main(["show", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run.root}: 2 of 3 updates, grpo\n")
    assert "unfinished" in shown
    assert main(["show", str(run.root), "--step", "1", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["updates"] == 2
    assert [s["step"] for s in told["steps"]] == [1]


def test_one_response(run, capsys):
    assert main(["show", str(run.root), "--step", "1", "--sample", "3", "--tokens"]) == 0
    shown = capsys.readouterr().out
    for words in ("sample_id       1000003", "label           4", "reward          2", "3+1="):
        assert words in shown
    assert "logp: -1 to -1, mean -1; 2 of 2 tokens valid" in shown
    assert "old_logp" in shown


def test_a_whole_sample_id_needs_no_step(run, capsys):
    assert main(["show", str(run.root), "--sample", "1000003"]) == 0
    assert "sample_id       1000003" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "7"], "--step 7: nothing there; the run has steps 0 to 2"),
        (["--sample", "3"], "--sample 3: of which step? give --step, or a whole sample_id"),
        (
            ["--step", "1", "--sample", "4"],
            "sample 1000004: not there; step 1 has samples 0 to 3",
        ),
        (
            ["--step", "0", "--sample", "0", "--color", "ratio"],
            "--color ratio: the step has no old_logp (no score stage)",
        ),
        (
            ["--step", "2", "--sample", "0", "--color", "advantage"],
            "--color advantage: the step has no advantages yet",
        ),
    ],
)
def test_what_is_not_there_is_one_line(run, capsys, words, message):
    assert main(["show", str(run.root), *words]) == 2
    assert capsys.readouterr().err == f"relax show: {message}\n"


def test_token_values(run):
    found = sample(run, 1, 1_000_003)
    assert token_values(found, "logp").tolist() == [-1.0, -1.0]
    np.testing.assert_allclose(token_values(found, "ratio"), [1.6487212707] * 2, rtol=1e-7)
    assert token_values(found, "advantage").tolist() == [2.0, 2.0]
    found["token_advantage"] = np.array([0.5, 1.5], np.float32)
    assert token_values(found, "advantage").tolist() == [0.5, 1.5]


def test_shades_run_from_red_over_white_to_green():
    white, red, green = (238, 238, 238), (95, 8, 8), (8, 95, 8)
    assert shade(1.0, "ratio") == white
    assert shade(0.0, "ratio") == red
    assert shade(2.0, "ratio") == green
    assert shade(0.0, "advantage") == white
    assert shade(-4.0, "logp") == white
    assert shade(-8.0, "logp") == shade(-99.0, "logp") == red
    assert shade(0.0, "logp") == green


def test_without_a_tokenizer_tokens_are_numbers(run):
    assert pieces(run, [10, 11]) == ["<10>", "<11>"]


def test_with_one_they_are_text(own_run, tmp_path):
    from relax.data.tasks import build_tokenizer

    build_tokenizer(own_run.root / "policies" / "000001.x")
    assert len(pieces(own_run, [10, 11])) == 2
    assert not any(piece.startswith("<1") for piece in pieces(own_run, [10, 11]))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (200 * 2**20, "200 MiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes(size, text):
    assert in_bytes(size) == text


def test_not_a_sample_of_a_step_without_rollout(run):
    with pytest.raises(ConfigError, match="no rollout committed"):
        sample(run, 9, 9_000_000)


def test_a_sample_of_another_step_is_refused():
    with pytest.raises(ConfigError, match=r"--step 2 --sample 1000003: that sample is of step 1"):
        _place(2, 1000003)
    assert _place(None, 1000003) == _place(1, 3) == (1, 3)
