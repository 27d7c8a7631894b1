import dataclasses

import numpy as np
import pytest
import torch
from training_cases import make_sequences, policy_gradient, value_regression
from transformers import AutoModelForCausalLM

from relax.errors import ArtifactError, ConfigError
from relax.trainer import build, checkpoint, learner, publish
from relax.trainer.actor import Actor
from relax.trainer.build import DTYPES
from relax.trainer.critic import Critic
from relax.trainer.learner import NonFiniteError
from relax.trainer.options import TrainerOptions
from relax.trainer.publish import policy_hash
from relax.trainer.sequences import LossParts, TrainSequence
from relax.trainer.sharded import ShardedModel
from relax.trainer.timing import step_flops

OPTIONS = TrainerOptions(lr=1e-3, max_tokens_per_gpu=60)


def step(trained, count=8, seed=0):
    sequences = make_sequences(count, seed)
    make_loss = policy_gradient if isinstance(trained, Actor) else value_regression
    return trained.train_step(sequences, make_loss(sequences))


def load(model_dir, **change):
    return Actor.load(model_dir, dataclasses.replace(OPTIONS, **change), num_schedule_steps=9)


@pytest.mark.parametrize("change", [{"recompute_every": 1}, {"recompute_every": 2}])
def test_recomputed_activations_change_no_bit(tied_dir, change):
    plain, frugal = load(tied_dir), load(tied_dir, **change)
    assert step(plain) == step(frugal)
    assert plain.weights_hash() == frugal.weights_hash()


def test_offload_changes_no_bit(tied_dir):
    plain, offloaded = load(tied_dir), load(tied_dir, offload="cpu")
    assert step(plain) == step(offloaded)
    assert plain.weights_hash() == offloaded.weights_hash()


@pytest.mark.slow
def test_compiled_blocks_train_the_same(tied_dir):
    plain, compiled = load(tied_dir), load(tied_dir, compile_blocks=True)
    assert step(compiled) == pytest.approx(step(plain), rel=1e-4)


@pytest.mark.slow
def test_compiled_blocks_do_not_depend_on_the_buckets_seen_before(tied_dir, tmp_path):
    """Sequences of ever more lengths: one compiled graph serves all, or a redo would drift."""

    def lengthened(count):
        lengths = [int(20 * 1.7**place) for place in range(count)]
        return [
            TrainSequence(i, np.arange(n) % 61, n - 2, {"mask": np.ones(n - 2, np.float32),
                          "advantage": np.linspace(-1, 1, n - 2, dtype=np.float32)})
            for i, n in enumerate(lengths)
        ]  # fmt: skip

    def steps(actor, counts):
        for count in counts:
            actor.train_step(lengthened(count), policy_gradient(lengthened(count)))
        return actor.weights_hash()

    options = {"compile_blocks": True, "max_tokens_per_gpu": 10_000}
    straight = load(tied_dir, **options)
    steps(straight, range(1, 10))
    straight.begin_save(tmp_path / "9")()
    torch._dynamo.reset()
    restored = load(tied_dir, **options)
    restored.restore(tmp_path / "9")
    assert steps(restored, [2, 9]) == steps(straight, [2, 9])


def test_bfloat16_computes_near_float32(untied_dir):
    plain, rounded = load(untied_dir), load(untied_dir, dtype="bfloat16")
    assert step(rounded)["loss"] == pytest.approx(step(plain)["loss"], abs=0.1)
    assert {weight.dtype for weight in rounded._model.weights.values()} == {torch.float32}


def test_only_named_parameters_move(untied_dir):
    actor = load(untied_dir, only_train_params_name_list=(r"layers\.1\.", "lm_head"))
    before = {name: w.full_tensor().clone() for name, w in actor._model.weights.items()}
    step(actor)
    moved = {
        n for n, w in actor._model.weights.items() if not torch.equal(w.full_tensor(), before[n])
    }
    assert moved == {n for n in before if "layers.1." in n or n == "lm_head.weight"}


def test_frozen_parameters_stay_through_a_checkpoint(untied_dir, tmp_path):
    actor = load(untied_dir, freeze_params_name_list=("embed_tokens",))
    before = actor._model.weights["model.embed_tokens.weight"].full_tensor().clone()
    step(actor)
    assert torch.equal(actor._model.weights["model.embed_tokens.weight"].full_tensor(), before)
    actor.begin_save(tmp_path / "1")()
    with pytest.raises(ArtifactError, match=r"embed_tokens\.weight was not trained there"):
        load(untied_dir).restore(tmp_path / "1")


def test_patterns_that_match_nothing_or_everything_are_refused(tied_dir):
    with pytest.raises(ConfigError, match="-list = 'laers' matches no parameter"):
        load(tied_dir, freeze_params_name_list=("laers",))
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        load(tied_dir, freeze_params_name_list=(".",))


def test_a_non_finite_loss_moves_nothing_and_names_the_samples(tied_dir, tmp_path, capsys):
    actor = load(tied_dir, micro_batch_size=1)
    sequences = make_sequences(5)
    before = actor.weights_hash()

    def poisoned(batch):
        parts = policy_gradient(sequences)(batch)
        is_third = torch.equal(
            batch["advantage_BT"][0], torch.from_numpy(sequences[3].fields["advantage"])
        )
        return LossParts(parts.loss * (float("nan") if is_third else 1.0))

    for _ in range(2):
        metrics = actor.train_step(sequences, poisoned)
        said = capsys.readouterr().err
        assert said.startswith("warning: trainer: optimizer step 0: loss = nan, grad_norm = nan; ")
        assert said.endswith("skipped; samples with a non-finite loss: [3]\n")
        assert metrics["skipped_steps"] == 1.0
        assert "lr" not in metrics
    assert (actor.step, actor.weights_hash(), actor.skipped_samples) == (0, before, (3,))
    with pytest.raises(NonFiniteError, match="3 in a row: stopped"):
        actor.train_step(sequences, poisoned, inspect_dir=tmp_path / "bad")
    kept = np.load(tmp_path / "bad" / "sample-3.npz")
    np.testing.assert_array_equal(kept["tokens"], sequences[3].tokens)
    np.testing.assert_array_equal(kept["advantage"], sequences[3].fields["advantage"])


def test_a_finite_step_between_forgives_the_skipped_ones(tied_dir, capsys):
    actor = load(tied_dir)
    sequences = make_sequences(5)
    for _ in range(2):
        for _ in range(2):
            actor.train_step(
                sequences,
                lambda batch: LossParts(batch["logp_BT"].sum() * 0 + _endless_slope(batch)),
            )
        assert capsys.readouterr().err.count("grad_norm = nan; skipped") == 2
        assert step(actor)["skipped_steps"] == 0.0
    assert actor.step == 2


def _endless_slope(batch):
    """A finite value whose gradient is not: the root of 0."""
    return (batch["logp_BT"].sum() - batch["logp_BT"].sum().detach()).sqrt()


def test_scoring_between_restores_sees_the_restored_weights(tied_dir, tmp_path):
    actor = load(tied_dir)
    sequences = make_sequences(6)
    first = actor.logp(sequences, 1.0)
    actor.begin_save(tmp_path / "0")()
    step(actor)
    second = actor.logp(sequences, 1.0)
    actor.restore(tmp_path / "0")
    for row, before, between in zip(actor.logp(sequences, 1.0), first, second, strict=True):
        np.testing.assert_array_equal(row, before)
        assert np.abs(row - between).max() > 1e-3


def test_reference_scores_equal_the_actors(tied_dir):
    sequences = make_sequences(6)
    rows = ShardedModel(tied_dir, OPTIONS, "logp").rows(sequences, "logp", 0.7)
    for row, expected in zip(rows, load(tied_dir).logp(sequences, 0.7), strict=True):
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_only_scores_has_no_master_weights(untied_dir, dtype):
    """The same bits from half the memory; patterns of what is trained do not concern it."""
    options = dataclasses.replace(OPTIONS, dtype=dtype, only_train_params_name_list=("laers",))
    scoring = ShardedModel(untied_dir, options, "logp", use="score")
    assert {weight.dtype for weight in scoring.weights.values()} == {DTYPES[dtype]}
    assert not any(weight.requires_grad for weight in scoring.weights.values())
    trained = load(untied_dir, dtype=dtype)
    assert {weight.dtype for weight in trained._model.weights.values()} == {torch.float32}
    sequences = make_sequences(6)
    for row, expected in zip(
        scoring.rows(sequences, "logp", 0.7), trained.logp(sequences, 0.7), strict=True
    ):
        np.testing.assert_array_equal(row, expected)
    for ours, theirs in zip(scoring.module.buffers(), trained._model.module.buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_what_a_checkpoint_fills_is_not_read_from_files(tied_dir, tmp_path, monkeypatch):
    actor = load(tied_dir)
    step(actor)
    actor.begin_save(tmp_path / "1")()
    monkeypatch.setattr(build, "read_weights", lambda *_: pytest.fail("read"))
    again = Actor.load(tied_dir, OPTIONS, num_schedule_steps=9, use="restore")
    again.restore(tmp_path / "1")
    assert (again.step, again.weights_hash()) == (1, actor.weights_hash())
    assert step(again, seed=1) == step(actor, seed=1)
    assert again.weights_hash() == actor.weights_hash()


def test_only_the_rank_that_writes_a_tensor_copies_it(tied_dir):
    model = load(tied_dir)._model
    file_of = publish.assign_files(model, torch.float32)
    live = {weight.to_local().data_ptr() for weight in model.weights.values()}
    whole = dict(publish._whole_tensors(model, torch.float32, file_of))
    assert {tensor.data_ptr() for tensor in whole.values()} <= live
    owned = dict(publish._owned_tensors(model, torch.float32, file_of))
    assert owned.keys() == whole.keys()
    assert live.isdisjoint(tensor.data_ptr() for tensor in owned.values())


def test_likeliest_words_are_those_of_the_logits(untied_dir):
    sequences = make_sequences(7)
    found = ShardedModel(untied_dir, OPTIONS, "logp").top_words(sequences, 5)
    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    for sequence, words_TK in zip(sequences, found, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(sequence.tokens)[None]).logits[0]
        expected_TK = logits_TV[-sequence.response_len - 1 : -1].topk(5).indices
        np.testing.assert_array_equal(words_TK, expected_TK)


def test_a_critic_starts_at_zero_learns_and_is_published_whole(tied_dir, tmp_path):
    critic = Critic.load(tied_dir, OPTIONS, num_schedule_steps=9)
    sequences = make_sequences(8)
    assert all(not row.any() for row in critic.values(sequences))
    losses = [step(critic)["loss"] for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    critic.publish(tmp_path / "critic", "float32")
    again = Critic.load(tmp_path / "critic", OPTIONS, num_schedule_steps=9)
    for one, other in zip(critic.values(sequences), again.values(sequences), strict=True):
        np.testing.assert_array_equal(one, other)


def test_published_files_are_split_indexed_and_hashed_alike(untied_dir, tmp_path, monkeypatch):
    actor = load(untied_dir)
    whole = actor.publish(tmp_path / "whole", "float32")
    monkeypatch.setattr(publish, "FILE_BYTES", 20_000)
    assert actor.publish(tmp_path / "split", "float32") == whole == policy_hash(tmp_path / "split")
    assert len(list((tmp_path / "split").glob("model-*-of-*.safetensors"))) > 1
    sequences = make_sequences(4)
    again = Actor.load(tmp_path / "split", OPTIONS, num_schedule_steps=1)
    assert again.weights_hash() == whole
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "split")
    assert torch.equal(model.lm_head.weight, actor._model.weights["lm_head.weight"].full_tensor())
    assert actor.logp(sequences, 1.0)[0].tolist() == again.logp(sequences, 1.0)[0].tolist()


DAMAGE = {
    "cut": "__0_0.distcp has {} bytes, {} were written",
    "flip": "__0_0.distcp has other content than was written",
    "remove": "__0_0.distcp is missing",
    "unlisted": "files.json is missing",
    "torn list": "files.json is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_checkpoint_is_named(tied_dir, tmp_path, damage):
    actor = load(tied_dir)
    step(actor)
    saved = actor.begin_save(tmp_path / "1")()
    assert checkpoint.find_fault(tmp_path / "1") == ""
    assert checkpoint.content_hash(tmp_path / "1") == saved
    file, listing = tmp_path / "1/__0_0.distcp", tmp_path / "1/files.json"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-10])
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    if damage == "remove":
        file.unlink()
    if damage == "unlisted":
        listing.unlink()
    if damage == "torn list":
        listing.write_text(listing.read_text()[:-1])
    said = DAMAGE[damage].format(len(data) - 10, len(data))
    assert checkpoint.find_fault(tmp_path / "1") == said
    assert checkpoint.steps_done(tmp_path / "1") is None


def test_each_rank_checks_its_share(tied_dir, tmp_path):
    load(tied_dir).begin_save(tmp_path / "1")()
    for file in (".metadata", "__0_0.distcp"):
        (tmp_path / "1" / file).write_bytes(b"")
    first, second = (checkpoint.fault_of_share(tmp_path / "1", rank, 2) for rank in range(2))
    assert first.startswith(".metadata has 0 bytes")
    assert second.startswith("__0_0.distcp has 0 bytes")


def test_a_save_in_the_background_holds_the_state_of_its_call(tied_dir, tmp_path):
    actor = load(tied_dir)
    step(actor)
    digest = actor.weights_hash()
    finish = actor.begin_save(tmp_path / "1", in_background=True)
    step(actor)
    finish()
    restored = load(tied_dir)
    restored.restore(tmp_path / "1")
    assert restored.weights_hash() == digest != actor.weights_hash()


def test_a_checkpoint_of_another_model_is_named(tied_dir, untied_dir, tmp_path):
    load(tied_dir).begin_save(tmp_path / "1")()
    with pytest.raises(ArtifactError, match=r"lm_head\.weight = nothing; the model has"):
        load(untied_dir).restore(tmp_path / "1")


def test_a_model_without_weights_or_config_is_named(tied_dir, tmp_path):
    with pytest.raises(ArtifactError, match=r"config\.json: missing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((tied_dir / "config.json").read_text())
    with pytest.raises(ArtifactError, match=r"no \*.safetensors; save"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"model\.safetensors: truncated or not"):
        load(tmp_path)


def test_timing_of_a_step(tied_dir):
    actor = load(tied_dir, max_tokens_per_gpu=1000)
    step(actor)
    timing = actor.timing
    phases = ("data", "forward", "loss", "backward", "communication", "optimizer")
    total_s = sum(timing[f"{name}_s"] for name in phases)
    assert 0.5 * timing["step_s"] < total_s <= timing["step_s"]
    num_tokens = sum(len(sequence.tokens) for sequence in make_sequences(8))
    assert timing["tokens_per_s"] * timing["step_s"] == pytest.approx(num_tokens)
    sequences = make_sequences(8)
    prompts = {s.prompt.tobytes(): len(s.prompt) for s in sequences}
    shared = sum(len(s.prompt) for s in sequences) - sum(prompts.values())
    assert timing["shared_tokens"] == shared / num_tokens > 0
    lengths = [len(s.tokens) - 1 for s in sequences]
    assert timing["padding_waste"] == pytest.approx(1 - sum(lengths) / (8 * max(lengths)))
    assert 0.1 < timing["peak_memory_gib"] < 20
    assert "mfu" not in timing


def test_timing_of_several_steps_is_of_their_sums(tied_dir):
    actor = load(tied_dir, max_tokens_per_gpu=1000)
    assert actor.timing == {}
    step(actor)
    first = actor.timing
    step(actor, count=5)
    both = actor.timing
    num_tokens = sum(len(s.tokens) for count in (8, 5) for s in make_sequences(count))
    assert both["tokens_per_s"] * both["step_s"] == pytest.approx(num_tokens)
    assert both["step_s"] > first["step_s"] and both["forward_s"] > first["forward_s"]
    actor.restart_timing()
    assert actor.timing == {}


def test_mfu_where_the_devices_peak_is_known(tied_dir, monkeypatch):
    monkeypatch.setattr(learner, "peak_flops", lambda: 1e9)
    actor = load(tied_dir, max_tokens_per_gpu=1000)
    step(actor)
    sequences = make_sequences(8)
    num_weights = sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(tied_dir).parameters()
    )
    # Three answers each to a prompt: its tokens go through once, the last of an answer never.
    prompts = {s.prompt.tobytes(): len(s.prompt) for s in sequences}
    distinct = sum(prompts.values()) + sum(s.response_len - 1 for s in sequences)
    pairs = sum(len(s.tokens) ** 2 for s in sequences)
    flops = 6 * num_weights * distinct + 6 * 2 * (2 * 16) * pairs
    assert actor.timing["mfu"] * actor.timing["step_s"] * 1e9 == pytest.approx(flops)


def test_flops_by_hand():
    # 10 weights, 2 layers of width 4, lengths 3 and 5 that share 2: 6*10*6 + 6*2*4*(9+25).
    assert step_flops(10, 2, 4, 6, 9 + 25) == 360 + 1632
