"""The hash of published weights: of each tensor alone, several at a time, in name order."""

import hashlib
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from relax.trainer import publish


@pytest.fixture
def policy(tmp_path):
    tensors = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_it_is_of_names_dtypes_shapes_and_bytes(policy):
    ones = hashlib.sha256(np.ones(4, np.float32).tobytes()).hexdigest()
    six = hashlib.sha256(np.arange(6, dtype=np.float32).tobytes()).hexdigest()
    lines = f"a float32 [4] {ones}\nb float32 [2, 3] {six}\n"
    assert publish.policy_hash(policy) == hashlib.sha256(lines.encode()).hexdigest()


def test_tensors_are_hashed_at_the_same_time(policy, monkeypatch):
    both, line = threading.Barrier(2, timeout=10), publish._line

    def meets_the_other(name, tensor):
        both.wait()
        return line(name, tensor)

    whole = publish.policy_hash(policy)
    monkeypatch.setattr(publish, "_line", meets_the_other)
    assert publish.policy_hash(policy) == whole
