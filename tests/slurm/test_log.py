"""Each line of a growing log comes once, and only when it is whole."""

from slurm.log import LogReader


def test_lines_come_once_and_whole(tmp_path):
    path = tmp_path / "log"
    reader = LogReader(lambda: [path])
    assert reader.lines() == []
    with path.open("ab", buffering=0) as log:
        log.write(b"first\nsec")
        assert reader.lines() == ["first"]
        log.write(b"ond\n\xff\n")
        assert reader.lines() == ["second", "\ufffd"]
        assert reader.lines() == []
