"""The prompts of a run are tokenized once; what is kept of that is trusted only when whole."""

import pytest
from rollout_cases import do, prompts_of, write_prompts

from relax.errors import ArtifactError
from relax.stages import prompts
from relax.stages.prompts import cached


@pytest.fixture
def reads(monkeypatch):
    """Sources that were read and tokenized."""
    seen, read = [], prompts.read_prompts

    def counting(path, *arguments, **settings):
        seen.append(path)
        return read(path, *arguments, **settings)

    monkeypatch.setattr(prompts, "read_prompts", counting)
    return seen


def kept(run):
    return sorted((run.root / "cache").iterdir())


def test_the_next_job_reads_what_the_first_one_made(start, tmp_path, reads):
    run = start()
    do(run)
    assert len(reads) == 1
    (file,) = kept(run)
    assert file.name.startswith("prompts-") and file.suffix == ".arrow"
    shown = prompts_of(run)
    again = start(run_dir=str(tmp_path / "again"))
    (again.root / "cache").mkdir()
    (again.root / "cache" / file.name).write_bytes(file.read_bytes())
    do(again)
    assert len(reads) == 1
    assert again.committed(0, "rollout").content == run.committed(0, "rollout").content
    assert [p.tolist() for p in prompts_of(again).prompt_tokens] == [
        p.tolist() for p in shown.prompt_tokens
    ]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_what_is_damaged_is_made_again(start, tmp_path, reads, damage):
    run = start()
    do(run)
    (file,) = kept(run)
    whole = file.read_bytes()
    text = whole.index(b"000=")
    broken = {
        "cut": whole[:-50],
        "changed": whole[:text] + b"009=" + whole[text + 4 :],
        "empty": b"",
        "other": b"not Arrow at all",
    }[damage]
    again = start(run_dir=str(tmp_path / "again"))
    (again.root / "cache").mkdir()
    (again.root / "cache" / file.name).write_bytes(broken)
    do(again)
    assert len(reads) == 2
    assert kept(again)[0].read_bytes() == whole
    assert again.committed(0, "rollout").content == run.committed(0, "rollout").content


def test_a_source_that_changed_is_told_also_where_it_was_kept(start, base_settings, tmp_path):
    run = start()
    do(run)
    write_prompts(tmp_path / "prompts.jsonl", ["other"] * 6)
    (run.root / "steps/000000/rollout").rename(tmp_path / "gone")
    with pytest.raises(ArtifactError, match="changed since the run began; put the old file back"):
        do(run)


def test_another_template_is_another_file(start, tmp_path, reads):
    files = set()
    for place, changes in enumerate(({}, {"prompt_template": "{input}1"}, {"label_key": "input"})):
        run = start(run_dir=str(tmp_path / str(place)), **changes)
        do(run)
        files |= {file.name for file in kept(run)}
    assert len(files) == 3
    # How long a prompt may be is asked anew.
    run = start(run_dir=str(tmp_path / "short"), rollout_max_prompt_len=100)
    do(run)
    assert kept(run)[0].name in files


def test_what_cannot_be_kept_costs_nothing_but_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    made = [prompts.Prompt(0, "a", (1, 2), "b")]
    assert cached(tmp_path / "file", {"k": 1}, lambda: made) == made
    assert "prompts are not kept" in capsys.readouterr().err
    assert cached(tmp_path / "cache", {"k": 1}, lambda: made) == made
    assert cached(tmp_path / "cache", {"k": 1}, list) == made
    assert cached(tmp_path / "cache", {"k": 2}, list) == []
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".arrow", ".arrow"]
