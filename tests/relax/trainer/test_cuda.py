"""What only a CUDA device runs: NCCL, bfloat16 kernels, fused AdamW, big tiles."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from training_cases import make_sequences, policy_gradient

from relax.trainer.actor import Actor
from relax.trainer.device import wide_logits
from relax.trainer.logprob import linear_logp
from relax.trainer.options import TrainerOptions
from relax.trainer.sharded import ShardedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
]
OPTIONS = TrainerOptions(lr=1e-4, max_tokens_per_gpu=60)


def test_log_probs_equal_the_hosts():
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(300, 64, generator=generator)
    weight_VH = torch.randn(5000, 64, generator=generator) / 8
    target_N = torch.randint(0, 5000, (300,), generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        hidden = hidden_NH.to(device).requires_grad_()
        weight = weight_VH.to(device).requires_grad_()
        logp_N, entropy_N = linear_logp(hidden, weight, target_N.to(device), 0.8)
        (logp_N.sum() + 0.1 * entropy_N.sum()).backward()
        found.append([logp_N, entropy_N, hidden.grad, weight.grad])
    for host, device in zip(*found, strict=True):
        assert (device.cpu() - host).norm() <= 1e-4 * host.norm()


def test_logits_of_bfloat16_factors_are_not_rounded():
    left = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    exact = left.double() @ right.double().T
    assert (wide_logits(left, right).double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_save_restore_and_publish(tied_dir, tmp_path, dtype, offload):
    options = dataclasses.replace(OPTIONS, dtype=dtype, offload=offload)
    actor = Actor.load(tied_dir, options, num_schedule_steps=6)
    rows = []
    for step in range(4):
        if step == 2:
            actor.begin_save(tmp_path / "2")()
        sequences = make_sequences(12, seed=step)
        rows.append(actor.train_step(sequences, policy_gradient(sequences)))
    second = Actor.load(tied_dir, options, num_schedule_steps=6)
    second.restore(tmp_path / "2")
    for step in (2, 3):
        sequences = make_sequences(12, seed=step)
        assert second.train_step(sequences, policy_gradient(sequences)) == rows[step]
    assert second.publish(tmp_path / "policy", "bfloat16") == actor.weights_hash("bfloat16")
    assert actor.timing["peak_memory_gib"] > 0


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
def test_flash_attention_stays_inside_each_sequence(tied_dir):
    sequences = make_sequences(12)
    options = dataclasses.replace(OPTIONS, dtype="bfloat16", max_tokens_per_gpu=1000)
    found = [
        ShardedModel(tied_dir, dataclasses.replace(options, **change), "logp").rows(
            sequences, "logp", 1.0
        )
        for change in ({}, {"attention": "flash_attention_2"})
    ]
    for dense, flash in zip(*found, strict=True):
        np.testing.assert_allclose(dense, flash, atol=0.1)
