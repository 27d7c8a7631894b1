"""Prompts that are computed once: who reads what, for every model type that shares them."""

import itertools

import numpy as np
import pytest
import torch
from test_actor import reference_logp
from training_cases import make_sequences
from transformers import AutoConfig, AutoModelForCausalLM

from relax.errors import ConfigError
from relax.trainer.actor import Actor
from relax.trainer.attention import ALIKE, BY_LAYER, attend, is_plain, make_reading
from relax.trainer.batch import lay_out_shared
from relax.trainer.options import TrainerOptions
from relax.trainer.sequences import TrainSequence

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "sliding_window": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(ALIKE | BY_LAYER))
def test_each_plain_model_type_gives_the_logp_of_the_sequence_alone(model_type, tmp_path):
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    sequences = make_sequences(12)
    actor = Actor.load(tmp_path, TrainerOptions(max_tokens_per_gpu=1000), num_schedule_steps=1)
    assert actor._model.module.shares_prompts
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    for sequence, logp_T in zip(sequences, actor.logp(sequences, 1.0), strict=True):
        np.testing.assert_allclose(logp_T, reference_logp(reference, sequence, 1.0), atol=5e-5)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt2", {}),
        ("gemma3_text", {}),
        ("mistral", {"sliding_window": 8}),
        ("phi3", {"sliding_window": 8, "layer_types": ["full_attention"] * 32}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}),
    ],
)
def test_other_attention_is_not_taken_for_plain(model_type, change):
    assert not is_plain(AutoConfig.for_model(model_type, **change))


def sequence(prompt, response):
    tokens = np.array([*prompt, *response])
    return TrainSequence(0, tokens, len(response), {"mask": np.ones(len(response), np.float32)})


def test_a_shared_prompt_lies_in_the_row_once():
    batch = lay_out_shared(
        [sequence([5, 6], [7, 8, 9]), sequence([5, 6], [4]), sequence([5], [6, 7])],
        torch.device("cpu"),
    )
    assert batch.token_RL.tolist() == [[5, 6, 7, 8, 5, 6]]
    assert batch.position_RL.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.source_N.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.target_N.tolist() == [7, 8, 9, 4, 6, 7]
    # Attention sees 4, 2 and 2 tokens, padded to 4 each; [5, 6] is shared once.
    assert batch.size == (11, 2, 6, 8, 4)


def test_a_reading_pads_with_the_sequences_own_first_tokens():
    reading = make_reading(
        [np.array([0, 1, 2, 3]), np.array([0, 1]), np.array([0, 4, 5])], 6, torch.device("cpu")
    )
    assert [bucket.tolist() for bucket in reading.bucket_bS] == [
        [[0, 1, 2, 3], [0, 4, 5, 0], [0, 1, 0, 1]]
    ]
    flat = torch.cat([bucket.flatten() for bucket in reading.bucket_bS])
    assert flat[reading.home_L].tolist() == [0, 1, 2, 3, 4, 5]
    assert reading.home_L.tolist() == [8, 9, 2, 3, 5, 6]


def test_short_sequences_are_not_padded_to_long_ones():
    lengths = [400, 390, 100, 90, 5]
    starts = np.cumsum([0, *lengths])
    tokens_B = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    reading = make_reading(tokens_B, sum(lengths), torch.device("cpu"))
    assert [tuple(bucket.shape) for bucket in reading.bucket_bS] == [(2, 400), (2, 100), (1, 5)]
    flat = torch.cat([bucket.flatten() for bucket in reading.bucket_bS])
    assert torch.equal(flat[reading.home_L], torch.arange(sum(lengths)))


def test_a_rank_without_sequences_runs_one_token():
    batch = lay_out_shared([], torch.device("cpu"))
    assert batch.token_RL.shape == (1, 1)
    assert batch.size == (0, 0, 1, 1, 0)
    assert len(batch.place_N) == 0
    assert batch.source_N.tolist() == [0]


SCALINGS = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 12,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(("scaling", "limit"), [("dynamic", 14), ("longrope", 12)])
def test_lengths_that_change_their_neighbours_angles_are_refused(scaling, limit, tmp_path):
    config = AutoConfig.for_model(
        "llama", **SMALL, max_position_embeddings=14, rope_parameters=SCALINGS[scaling]
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    actor = Actor.load(tmp_path, TrainerOptions(max_tokens_per_gpu=1000), num_schedule_steps=1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    fitting = [s for s in make_sequences(12) if len(s.tokens) <= limit]
    for one, logp_T in zip(fitting, actor.logp(fitting, 1.0), strict=True):
        np.testing.assert_allclose(logp_T, reference_logp(reference, one, 1.0), atol=5e-5)
    longer = sequence([5] * limit, [6])
    with pytest.raises(ConfigError, match=f"has {limit + 1} tokens, and .* more than {limit} ch"):
        actor.logp([*fitting, longer], 1.0)


def test_a_layer_that_is_not_plain_is_not_taken_silently():
    states = torch.zeros(1, 2, 1, 8)
    reading = make_reading([np.zeros(1, np.int64)], 1, torch.device("cpu"))
    with pytest.raises(AssertionError, match="softcap"):
        attend(torch.nn.Module(), states, states, states, None, reading=reading, softcap=3.0)
