import hashlib
import json
import shutil

import pytest

from relax.cli import main
from relax.store import Output


def publish(run, step):
    """An update with a policy and a checkpoint, as small as they can be."""
    import torch
    from safetensors.torch import save_file

    from relax.trainer.checkpoint import FILES, checked_hash
    from relax.trainer.publish import policy_hash

    def policy(directory):
        save_file({"w": torch.tensor([float(step), 1.0])}, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")
        return policy_hash(directory)

    def checkpoint(directory):
        (directory / "actor").mkdir()
        (directory / "actor/state").write_text("state")
        listed = {"state": (5, hashlib.sha256(b"state").hexdigest())}
        (directory / "actor" / FILES).write_text(json.dumps(listed))
        return checked_hash(directory)

    output = Output(run.root, step, "update", attempt="a", key_parts={"stage": "update"})
    output.publish("policies", step + 1, policy)
    output.publish("checkpoints", step + 1, checkpoint)
    output.commit()


def verdict(run, capsys):
    code = main(["verify", str(run.root)])
    return code, capsys.readouterr().out.splitlines()


def test_a_whole_run(own_run, capsys):
    publish(own_run, 2)
    code, lines = verdict(own_run, capsys)
    assert code == 0
    assert len(lines) == 1
    assert "13 stages, 15 tables, 1 policies, 1 checkpoints: all as committed" in lines[0]


def test_a_flipped_byte_is_found_and_named(own_run, capsys):
    path = own_run.root / "steps" / "000001" / "reward" / "rewards.arrow"
    data = bytearray(path.read_bytes())
    place = bytes(data).index(b"\x00\x00\x00\x00\x00\x00\xf0\x3f")  # 1.0
    data[place + 7] = 0x40
    path.write_bytes(data)
    code, lines = verdict(own_run, capsys)
    assert code == 1
    assert lines[0].startswith(f"{path}: content is ")
    assert "1 differ from their manifests" in lines[-1]


@pytest.mark.parametrize("kind", ["policies", "checkpoints"])
def test_a_changed_policy_or_checkpoint(own_run, capsys, kind):
    publish(own_run, 2)
    file = {"policies": "model.safetensors", "checkpoints": "actor/state"}[kind]
    (published,) = (own_run.root / kind).glob("000003*")
    path = published / file
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    code, lines = verdict(own_run, capsys)
    assert code == 1
    said = {"policies": "content is ", "checkpoints": "actor/state has other content than was"}
    assert lines[0].startswith(f"{published}: {said[kind]}")


def test_an_edited_manifest_a_truncated_table_and_a_stray_directory(own_run, capsys):
    steps = own_run.root / "steps"
    manifest = steps / "000000" / "reward" / "manifest.json"
    told = json.loads(manifest.read_text())
    told["key_parts"]["step"] = 5
    manifest.write_text(json.dumps(told))
    table = steps / "000001" / "rollout" / "prompts.arrow"
    table.write_bytes(table.read_bytes()[:100])
    (steps / "000002" / "update").mkdir()
    code, lines = verdict(own_run, capsys)
    assert code == 1
    assert lines[0] == f"{manifest}: key is not the hash of key_parts; it was edited"
    assert lines[1].startswith(f"{table}: 100 bytes, the manifest says ")
    assert lines[2].startswith(f"{steps / '000002' / 'update'}: no manifest.json")


def test_a_stage_made_from_another_input(own_run, capsys):
    parts = {"inputs": {"rollout": "something else"}}
    Output(own_run.root, 2, "advantage", attempt="a", key_parts=parts).commit()
    code, lines = verdict(own_run, capsys)
    assert code == 1
    assert lines[0].endswith(
        "steps/000002/advantage: made from another rollout than the one beside it"
    )


def test_what_retention_removed_is_no_fault(own_run, capsys):
    publish(own_run, 2)
    (policy,) = (own_run.root / "policies").iterdir()
    for file in policy.iterdir():
        file.unlink()
    policy.rmdir()
    code, lines = verdict(own_run, capsys)
    assert code == 0
    assert "; 1 removed by retention" in lines[0]


def test_export_copies_the_policy(own_run, tmp_path, capsys):
    publish(own_run, 2)
    # steps 0 and 1 of this run published nothing
    target = tmp_path / "out"
    assert main(["export", str(own_run.root), "--step", "2", str(target)]) == 0
    (policy,) = (own_run.root / "policies").iterdir()
    assert sorted(f.name for f in target.iterdir()) == ["config.json", "model.safetensors"]
    copied = (target / "model.safetensors").read_bytes()
    assert copied == (policy / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["export", str(own_run.root), "--step", "2", str(target)]) == 2
    assert capsys.readouterr().err.endswith("exists; give a directory that does not\n")


def test_export_of_what_is_gone_says_what_is_there(own_run, tmp_path, capsys):
    publish(own_run, 2)
    for kind in ("policies", "checkpoints"):
        shutil.rmtree(own_run.root / kind, ignore_errors=True)
    assert main(["export", str(own_run.root), "--step", "2", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert "the policy of step 2 was removed by retention, and no checkpoint holds it" in err
    assert err.endswith("steps whose policy is there: none\n")


@pytest.mark.parametrize("step", ["-1", "8"])
def test_export_of_a_step_that_is_none(own_run, tmp_path, capsys, step):
    publish(own_run, 2)
    assert main(["export", str(own_run.root), f"--step={step}", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"--step {step}: no such step; steps whose policy is there: 2" in said
