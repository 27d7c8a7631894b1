"""Turns and tools: what was sampled stays, what tools say is masked, batches are fixed."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.engines import NotFiniteError, Request, Response, SamplingParams
from relax.engines.calculator import calculate, generate
from relax.engines.conversation import converse, plain
from relax.engines.embedded import TransformersEngine
from relax.errors import ArtifactError

PROMPTS = [(40, 41, 42), (50, 51), (60,)]


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def engine(tiny):
    engine = TransformersEngine(device="cpu")
    engine.load(tiny)
    return engine


def requests_of(prompts=PROMPTS):
    return [Request(prompt, seed=100 + i) for i, prompt in enumerate(prompts)]


class Scripted:
    """An engine that says given texts, one a turn; it writes down what it was asked."""

    def __init__(self, tokenizer, *turns: str) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.calls: list[tuple[list[Request], SamplingParams]] = []

    def sample(self, requests, params):
        self.calls.append((list(requests), params))
        tokens = self.tokenizer(self.turns.pop(0)).input_ids[: params.max_response_len]
        logp = [-0.5 - place for place in range(len(tokens))]
        return [Response(list(tokens), list(logp), "stop") for _ in requests]


def test_the_calculator_answers_between_turns(tokenizer):
    said = ("6 boxes: <<6*7>>", " and <<(42+1)/2>>", " done<eos>")
    engine = Scripted(tokenizer, *said)
    (found,) = converse(
        engine, requests_of([(5, 6)]), SamplingParams(max_response_len=99), generate, tokenizer
    )
    text = "6 boxes: <<6*7>>42 and <<(42+1)/2>>21.5 done<eos>"
    assert tokenizer.decode(found.tokens) == text
    assert found.num_turns == 3 and found.finish_reason == "stop"
    tool = [t for t, m in zip(found.tokens, found.mask, strict=True) if not m]
    assert tokenizer.decode(tool) == "4221.5"
    assert [p for p, m in zip(found.logp, found.mask, strict=True) if not m] == [0.0] * 6
    assert sum(found.logp) == -sum(
        0.5 + place for turn in said for place in range(len(tokenizer(turn).input_ids))
    )
    # Each turn was asked with exactly the ids that came before.
    first = len(tokenizer(said[0]).input_ids)
    (request,), params = engine.calls[1]
    assert request.prompt_tokens == (5, 6, *found.tokens[: first + 2])
    assert params.stop == (">>",) and params.max_response_len == 99 - first - 2
    assert len({r.seed for ((r,), _) in engine.calls}) == 3
    assert engine.calls[0][0][0].seed == 100


def test_a_tool_answer_over_the_limit_is_cut_and_ends_it(tokenizer):
    engine = Scripted(tokenizer, "<<100000*100000>>", "never")
    params = SamplingParams(max_response_len=20)
    (found,) = converse(engine, requests_of([(5,)]), params, generate, tokenizer)
    assert tokenizer.decode(found.tokens) == "<<100000*100000>>100"
    assert found.finish_reason == "length" and found.num_turns == 2  # the second had no room
    assert len(engine.calls) == 1


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("-(4-6)", "2"), ("1/3", "0.333333"), ("0.1+0.2", "0.3"),
        ("10/4", "2.5"), ("2**9", "error"), ("1/0", "error"), ("", "error"), ("a", "error"),
        ("__import__('os')", "error"), ("9" * 60, "error"), ("(" * 150 + "1", "error"),
        ("True+1", "error"), ("1e400", "error"), ("1+" * 90 + "1", "91"),
    ],
)  # fmt: skip
def test_calculator(expression, value):
    assert calculate(expression) == value


async def one_turn(conversation):
    await conversation.sample()


async def two_turns(conversation):
    turn = await conversation.sample(max_tokens=5)
    assert turn.tokens == conversation.tokens
    conversation.append("[42]")
    await conversation.sample()


def test_one_turn_is_a_plain_response(engine, tokenizer):
    params = SamplingParams(max_response_len=12)
    assert converse(engine, requests_of(), params, one_turn, tokenizer) == plain(
        engine.sample(requests_of(), params)
    )


def test_log_probs_of_later_turns_are_those_of_the_whole_sequence(engine, tokenizer, tiny):
    """Half a character decodes to another text: ids must never go through it."""
    params = SamplingParams(max_response_len=24, temperature=0.8, ignore_eos=True)
    found = converse(engine, requests_of(), params, two_turns, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    changed = 0
    for prompt, response in zip(PROMPTS, found, strict=True):
        assert response.mask == [True] * 5 + [False] * 4 + [True] * 15
        assert tokenizer.decode(response.tokens[5:9]) == "[42]"
        whole = torch.tensor([[*prompt, *response.tokens]])
        with torch.no_grad():
            logp_TV = (model(whole).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        expected = logp_TV.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        for place, is_sampled in enumerate(response.mask):
            value = expected[place].item() if is_sampled else 0.0
            assert response.logp[place] == pytest.approx(value, abs=1e-4)
        text = tokenizer.decode(response.tokens)
        changed += tokenizer(text, add_special_tokens=False).input_ids != response.tokens
    assert changed  # or the test would not show that ids are kept


def test_the_engine_is_asked_when_all_wait_whatever_tools_take(engine, tokenizer):
    calls, whole = [], engine.sample

    class Recorded:
        def sample(self, requests, params):
            calls.append([r.prompt_tokens[0] for r in requests])
            return whole(requests, params)

    async def slow(conversation):
        first = conversation.prompt_tokens[0]
        await conversation.sample(max_tokens=2)
        await asyncio.sleep({40: 0.05, 50: 0.0, 60: 0.02}[first])
        if first != 50:
            await conversation.sample(max_tokens=2)

    converse(Recorded(), requests_of(), SamplingParams(max_response_len=9), slow, tokenizer)
    assert calls == [[40, 50, 60], [40, 60]]


def test_a_function_that_fails_is_one_line(engine, tokenizer):
    async def broken(conversation):
        await conversation.sample(max_tokens=1)
        if conversation.prompt_tokens[0] == 50:
            raise KeyError("tool")

    with pytest.raises(ArtifactError, match="request 1: KeyError: 'tool'"):
        converse(engine, requests_of(), SamplingParams(), broken, tokenizer)


def test_numbers_that_are_not_finite_name_the_conversation(tokenizer):
    class Broken:
        def sample(self, requests, params):
            if len(requests) == 1:
                raise NotFiniteError("not finite", [0])
            return [Response([40], [0.0], "stop") for _ in requests]

    async def again(conversation):
        await conversation.sample()
        if conversation.prompt_tokens[0] == 60:
            await conversation.sample()

    with pytest.raises(NotFiniteError) as caught:
        converse(Broken(), requests_of(), SamplingParams(), again, tokenizer)
    assert caught.value.requests == (2,)
