import importlib.util

import pytest

from relax.engines import ENGINES, SamplingParams, open_engine
from relax.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"temperature": -0.1}, "sampling: temperature = -0.1; must be >= 0"),
        ({"temperature": float("nan")}, "sampling: temperature = nan; must be >= 0"),
        ({"top_p": 0.0}, "sampling: top_p = 0.0; must be in (0, 1]"),
        ({"top_k": -1}, "sampling: top_k = -1; must be >= 0 (0: all tokens)"),
        ({"max_response_len": -2}, "sampling: max_response_len = -2; must be >= 0"),
        ({"stop": ("",)}, "sampling: stop = ('',); must be a tuple of non-empty strings"),
    ],
)
def test_bad_sampling_params(changes, line):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**changes)
    assert str(error.value) == line


def test_greedy_is_never_truncated():
    assert not SamplingParams(temperature=0, top_k=1).is_truncated
    assert SamplingParams(top_k=1).is_truncated


def test_unknown_engine_names_the_nearest():
    said = r"engine = 'vlm': known: transformers, vllm, external; did you mean vllm\?"
    with pytest.raises(ConfigError, match=said):
        open_engine("vlm")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_not_installed():
    with pytest.raises(ConfigError, match="engine: 'vllm' is not installed here; pip install"):
        open_engine("vllm")


def test_table_opens():
    assert type(open_engine("transformers")).__name__ == "TransformersEngine"
    assert set(ENGINES) == {"transformers", "vllm", "external"}
