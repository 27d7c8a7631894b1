import pytest

from relax.engines import Request, SamplingParams, published
from relax.engines.stopping import StopStrings, listed, response_limits


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return published.load_tokenizer(tiny)


def completions(tokenizer, stop, text):
    """After which bytes of `text` a stop string is found complete (tokens are bytes)."""
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    stops = StopStrings(tokenizer, stop)
    return [n for n in range(1, len(tokens) + 1) if stops.completed(tokens[:n])]


def test_the_token_that_completes_a_stop_string(tokenizer):
    assert completions(tokenizer, ("ab",), "xxab yab") == [4, 8]
    assert completions(tokenizer, ("\n\n",), "a\n\nb\n") == [3]
    assert completions(tokenizer, ("aa",), "aaab") == [2, 3]
    assert completions(tokenizer, ("bc", "c"), "abcd") == [3]
    assert completions(tokenizer, ("none",), "abcd") == []


def test_long_responses_are_read_through_a_window(tokenizer):
    assert completions(tokenizer, ("needle",), "x" * 300 + "needle" + "x" * 100) == [306]


def test_characters_of_several_tokens(tokenizer):
    # "\u00e9" is two bytes; it counts when the second arrives.
    assert completions(tokenizer, ("\u00e9",), "ab\u00e9c") == [4]
    assert completions(tokenizer, ("b\u20ac",), "ab\u20acc\u20ac") == [5]


def test_special_tokens_are_text(tokenizer):
    stops = StopStrings(tokenizer, ("<eos>",))
    assert not stops.completed([50, 51])
    assert stops.completed([50, 51, tokenizer.eos_token_id])


def test_response_limits():
    requests = [Request((1,) * length, 0) for length in (3, 9, 10, 12)]
    params = SamplingParams(max_response_len=4)
    assert response_limits(requests, params, 0) == [4, 4, 4, 4]
    assert response_limits(requests, params, 10) == [4, 1, 0, 0]
    params = SamplingParams(max_response_len=4, max_context_len=6)
    assert response_limits(requests, params, 10) == [3, 0, 0, 0]


def test_listed():
    assert listed([3, 5]) == "3, 5"
    assert listed(range(9), most=2) == "0, 1 ... (9 in all)"
