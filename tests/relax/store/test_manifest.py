"""What a manifest says of a stage, and how a damaged one is refused."""

import json
from pathlib import Path

import pytest
from store_cases import attempt, update

from relax.errors import ArtifactError
from relax.store.manifest import FORMAT, check_sizes, differences, digest, read_manifest


def committed(tmp_path):
    attempt(tmp_path, "a").commit()
    return tmp_path / "steps/000000/rollout"


def edited(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_content_is_tables_and_policy_alone(tmp_path):
    update(tmp_path / "one", 3, "a")
    update(tmp_path / "two", 3, "b", checkpoint=False)
    one, two = (read_manifest(tmp_path / n / "steps/000003/update") for n in ("one", "two"))
    assert one.content == two.content
    assert one.identity == two.identity
    other = one.model_copy(update={"policy": one.policy.model_copy(update={"hash": "other"})})
    assert other.content != one.content
    timed = one.model_copy(update={"timing": [("seconds/total", 1.0, None)]})
    assert timed.content == one.content


def test_what_was_measured_returns(tmp_path):
    output = attempt(tmp_path, "a")
    output.measure("seconds/total", 1.5)
    output.measure("host", text="here")
    output.commit()
    manifest = read_manifest(tmp_path / "steps/000000/rollout")
    assert manifest.timing == [("seconds/total", 1.5, None), ("host", None, "here")]


def test_a_torn_manifest_names_the_file(tmp_path):
    folder = committed(tmp_path)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match=r"rollout/manifest.json: damaged"):
        read_manifest(folder)


def test_a_foreign_field_is_named(tmp_path):
    folder = committed(tmp_path)
    edited(folder, surprise=1)
    with pytest.raises(ArtifactError, match=r"manifest.json: damaged: surprise"):
        read_manifest(folder)


def test_another_format_is_told(tmp_path):
    folder = committed(tmp_path)
    edited(folder, format=FORMAT + 1)
    with pytest.raises(ArtifactError, match=f"format = {FORMAT + 1}; this version reads {FORMAT}"):
        read_manifest(folder)


def test_a_truncated_table_is_told_with_both_sizes(tmp_path):
    folder = committed(tmp_path)
    data = (folder / "metrics.arrow").read_bytes()
    (folder / "metrics.arrow").write_bytes(data[:-9])
    said = f"metrics.arrow: {len(data) - 9} bytes, the manifest says {len(data)} bytes"
    with pytest.raises(ArtifactError, match=said):
        read_manifest(folder)


def test_a_missing_table_is_told(tmp_path):
    folder = committed(tmp_path)
    (folder / "metrics.arrow").unlink()
    with pytest.raises(ArtifactError, match=r"metrics.arrow: missing, the manifest says"):
        read_manifest(folder)


def test_a_table_that_vanishes_at_the_look_is_missing(tmp_path, monkeypatch):
    """As when another flow removes a shard that is committed elsewhere."""
    folder = committed(tmp_path)
    stat, gone = Path.stat, []

    def vanished(self, **how):
        if self.suffix == ".arrow" and not gone:
            gone.append(self.name)
            found = stat(self, **how)
            self.unlink()
            return found
        return stat(self, **how)

    manifest = read_manifest(folder)
    monkeypatch.setattr(Path, "stat", vanished)
    check_sizes(folder, manifest)  # one look: what was there then counts
    assert gone == ["metrics.arrow"]
    with pytest.raises(ArtifactError, match=r"metrics.arrow: missing, the manifest says"):
        check_sizes(folder, manifest)


def test_differences_name_what_changed():
    old = {"config": {"update": {"lr": 1e-5, "seed": 1}}, "inputs": {"rollout": "a" * 64}}
    new = {"config": {"update": {"lr": 1e-6, "seed": 1}}, "inputs": {"rollout": "b" * 64}}
    assert differences(old, new) == [
        "config.update.lr: 1e-05 -> 1e-06",
        'inputs.rollout: "aaaaaaaaaaa..aaaaaaa" -> "bbbbbbbbbbb..bbbbbbb"',
    ]
    assert differences(old, {**old, "step": 1}) == ["step: null -> 1"]


def test_digest_is_canonical_and_refuses_what_json_cannot_say():
    assert digest({"b": 1, "a": [1.5, None]}) == digest({"a": [1.5, None], "b": 1})
    assert digest({"a": 1}) != digest({"a": 1.0})
    with pytest.raises(ValueError, match="Out of range float"):
        digest({"a": float("nan")})
