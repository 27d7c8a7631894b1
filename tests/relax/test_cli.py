"""The command line: help that fits a screen, exit codes, one line for what users can mend."""

import subprocess
import sys

import pytest

from relax import __version__, cli
from relax.errors import ArtifactError, ConfigError


class JobError(ValueError):
    """As slurm's: known by its name, since relax does not import slurm."""


def raising(error, monkeypatch):
    def command(argv):
        raise error

    monkeypatch.setattr(cli, "command", lambda name: command)


def test_help_fits_a_screen_and_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {*cli.COMMANDS, *cli.BUILT_IN} <= listed


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"relax {name} " in shown[shown.index("example") :]


def test_help_of_a_command_by_the_word_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["help", "verify"])
    assert capsys.readouterr().out.startswith("usage: relax verify")


def test_no_words_is_wrong_usage(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: relax COMMAND")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"relax {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert cli.main(["shwo"]) == 2
    assert capsys.readouterr().err == (
        "relax shwo: no such command; did you mean show?; see relax --help\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x = 3: must be 4"), 2),
        (ArtifactError("x = 3: must be 4"), 1),
        (JobError("x = 3: must be 4"), 1),
    ],
)
def test_errors_of_the_user_are_one_line_and_an_exit_code(error, code, monkeypatch, capsys):
    raising(error, monkeypatch)
    assert cli.main(["sql"]) == code
    assert capsys.readouterr() == ("", "relax sql: x = 3: must be 4\n")


def test_debug_shows_the_traceback(monkeypatch):
    raising(ConfigError("x"), monkeypatch)
    with pytest.raises(ConfigError):
        cli.main(["sql", "--debug"])


def test_errors_of_ours_are_never_hidden(monkeypatch):
    raising(ValueError("a bug"), monkeypatch)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["sql"])


def test_a_file_of_the_users_that_cannot_be_used_is_one_line(monkeypatch, capsys):
    raising(PermissionError(13, "Permission denied", "/x/y"), monkeypatch)
    assert cli.main(["sql"]) == 1
    assert capsys.readouterr().err == "relax sql: /x/y: cannot be used: Permission denied\n"


def test_ctrl_c(monkeypatch, capsys):
    raising(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["sql"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"
    raising(KeyboardInterrupt("stopped"), monkeypatch)
    assert cli.main(["sql"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_without_the_checkout_it_says_so(monkeypatch):
    class Entry:
        name = "train"

        def load(self):
            raise ModuleNotFoundError("No module named 'flows'", name="flows")

    monkeypatch.setattr(cli, "entry_points", lambda group: [Entry()])
    with pytest.raises(ConfigError, match="needs the checkout: flows, tasks and slurm are not in"):
        cli.command("train")


@pytest.mark.integration
def test_a_reader_that_left_is_no_error():
    main = "import sys; from relax.cli import main; sys.exit(main())"
    done = subprocess.run(
        f"{sys.executable} -c '{main}' sql --columns | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "responses\n"
    assert done.stderr == ""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sql", "/nowhere", "SELECT 1"], 1, "relax sql: /nowhere/run.json: missing"),
        (["check", "--lr", "x"], 2, "relax check: --lr = 'x'"),
        (["train", "--lrr", "3"], 2, "relax train: --lrr: no such flag; did you mean --lr?"),
        (["train", "/no.toml"], 2, "relax train: /no.toml: no such file"),
    ],
)
def test_a_process_ends_with_the_code_and_without_a_traceback(words, code, said):
    main = "import sys; from relax.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", main, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lrr", "3"], "--lrr: no such flag; did you mean --lr?"),
        (["--learning-rate", "3"], "--learning-rate: no such flag; did you mean --lr?"),
        (["--zzz=3", "stray", "more"], "--zzz=3: no such flag\nmore: not expected here"),
    ],
)
def test_an_unknown_flag_is_one_line_with_its_value(words, said, capsys):
    assert cli.main(["check", *words]) == 2
    assert capsys.readouterr().err == f"relax check: {said}\n"


def test_names_are_near_whatever_their_case(capsys):
    assert cli.main(["check", "--advantage-estimator", "GRPO"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err
