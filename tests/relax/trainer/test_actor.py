import dataclasses

import numpy as np
import pytest
import torch
from training_cases import make_sequences, policy_gradient
from transformers import AutoModelForCausalLM

from relax.errors import ConfigError
from relax.trainer.actor import Actor
from relax.trainer.options import TrainerOptions
from relax.trainer.publish import policy_hash

OPTIONS = TrainerOptions(lr=1e-3, weight_decay=0.1, temperature=0.7, max_tokens_per_gpu=60)


def reference_logp(model, sequence, temperature):
    with torch.no_grad():
        logits_TV = model(torch.from_numpy(sequence.tokens)[None]).logits[0] / temperature
    target_T = torch.from_numpy(sequence.tokens[1:])
    logp_T = logits_TV[:-1].log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    return logp_T[len(logp_T) - sequence.response_len :].numpy()


@pytest.mark.parametrize("budget", [17, 60, 1000])
@pytest.mark.parametrize("model", ["tied_dir", "untied_dir", "window_dir"])
def test_packed_logp_is_that_of_the_sequence_alone(request, model, budget):
    directory = request.getfixturevalue(model)
    options = dataclasses.replace(OPTIONS, max_tokens_per_gpu=budget)
    sequences = make_sequences(20)
    actor = Actor.load(directory, options, num_schedule_steps=1)
    assert actor._model.module.shares_prompts == (model != "window_dir")
    reference = AutoModelForCausalLM.from_pretrained(directory)
    for sequence, logp_T in zip(sequences, actor.logp(sequences, 0.7), strict=True):
        np.testing.assert_allclose(logp_T, reference_logp(reference, sequence, 0.7), atol=2e-5)


@pytest.mark.parametrize("model", ["tied_dir", "untied_dir", "window_dir"])
def test_steps_match_plain_torch(request, model):
    directory = request.getfixturevalue(model)
    sequences = make_sequences(16)
    actor = Actor.load(directory, OPTIONS, num_schedule_steps=3)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    decayed = [weight for weight in reference.parameters() if weight.ndim >= 2]
    others = [weight for weight in reference.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    num_tokens = sum(sequence.response_len for sequence in sequences)
    for _ in range(3):
        total = torch.zeros(())
        for sequence in sequences:
            logits_TV = reference(torch.from_numpy(sequence.tokens)[None]).logits[0] / 0.7
            logp_TV = logits_TV[len(logits_TV) - sequence.response_len - 1 : -1].log_softmax(-1)
            target_T = torch.from_numpy(sequence.tokens[-sequence.response_len :])
            logp_T = logp_TV.gather(1, target_T[:, None])[:, 0]
            entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
            advantage_T = torch.from_numpy(sequence.fields["advantage"])
            total = total + (-advantage_T * logp_T - 0.01 * entropy_T).sum() / num_tokens
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        metrics = actor.train_step(sequences, policy_gradient(sequences))
        assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["lr"] == 1e-3
    expected = dict(reference.named_parameters())
    for name, weight in actor._model.weights.items():
        difference = (weight.full_tensor() - expected[name]).norm()
        assert difference <= 1e-4 * expected[name].norm(), name


def test_cuts_do_not_change_the_step(tied_dir):
    sequences = make_sequences(16)
    finals = []
    for change in (
        {"max_tokens_per_gpu": 17},
        {"max_tokens_per_gpu": 999},
        {"micro_batch_size": 3},
    ):
        options = dataclasses.replace(OPTIONS, lr=1e-4, **change)
        actor = Actor.load(tied_dir, options, num_schedule_steps=1)
        metrics = actor.train_step(sequences, policy_gradient(sequences))
        finals.append((metrics, [weight.full_tensor() for weight in actor._model.weights.values()]))
    for metrics, weights in finals[1:]:
        assert metrics == pytest.approx(finals[0][0], rel=1e-5)
        for one, other in zip(weights, finals[0][1], strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tied_dir", "untied_dir"])
def test_published_directory_has_the_hash_and_the_logits(request, model, dtype, tmp_path):
    directory = request.getfixturevalue(model)
    sequences = make_sequences(8)
    options = dataclasses.replace(OPTIONS, sampling_dtype=dtype)
    actor = Actor.load(directory, options, num_schedule_steps=1)
    before = actor.weights_hash()
    actor.train_step(sequences, policy_gradient(sequences))
    actor.publish(tmp_path / "policy", dtype)
    assert actor.weights_hash() == policy_hash(tmp_path / "policy") != before
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tolerance = 2e-5 if dtype == "float32" else 0.1
    for sequence, logp_T in zip(sequences, actor.logp(sequences, 1.0), strict=True):
        expected_T = reference_logp(published, sequence, 1.0)
        np.testing.assert_allclose(logp_T, expected_T, atol=tolerance)


def test_restored_in_place_continues_to_the_bit(untied_dir, tmp_path):
    options = dataclasses.replace(OPTIONS, lr_decay_style="cosine", lr_warmup_iters=2)
    straight = Actor.load(untied_dir, options, num_schedule_steps=6)
    rows = [straight.train_step(s, policy_gradient(s)) for s in map(steps_data, range(6))]
    first = Actor.load(untied_dir, options, num_schedule_steps=6)
    for step in range(3):
        first.train_step(steps_data(step), policy_gradient(steps_data(step)))
    first.begin_save(tmp_path / "saved")()
    second = Actor.load(untied_dir, options, num_schedule_steps=6)
    second.restore(tmp_path / "saved")
    assert second.step == 3
    for step in range(3, 6):
        sequences = steps_data(step)
        assert second.train_step(sequences, policy_gradient(sequences)) == rows[step]
    assert second.weights_hash() == straight.weights_hash()


def steps_data(step):
    return make_sequences(12, seed=step)


def test_too_long_a_sequence_names_the_flag(tied_dir):
    options = dataclasses.replace(OPTIONS, max_tokens_per_gpu=4)
    actor = Actor.load(tied_dir, options, num_schedule_steps=1)
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu = 4; the longest sequence has"):
        actor.logp(make_sequences(16), 1.0)
