import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax.engines import Request, SamplingParams
from relax.engines.embedded import TransformersEngine
from relax.errors import ArtifactError, ConfigError

pytest.importorskip("vllm")
pytestmark = pytest.mark.integration

from relax.engines.vllm import VLLMEngine, WorkerExtension  # noqa: E402

EOS = 1
RAGGED = [tuple(range(10, 10 + length)) for length in (3, 11, 1, 7, 7, 5)]
LONG = tuple(range(2, 202))  # longer than a block of the prefix cache (128 tokens on a CPU)


@pytest.fixture(scope="module")
def engine():
    engine = VLLMEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def policies(make_model, tmp_path_factory):
    """Two versions of a tied and of an untied model, the head published in each."""

    def publish(seed, tied):
        policy = make_model(seed=seed, tie_word_embeddings=tied)
        tensors = load_file(policy / "model.safetensors")
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
        return policy

    return {(tied, seed): publish(seed, tied) for tied in (True, False) for seed in (1, 2)}


def requests_of(prompts):
    return [Request(prompt, seed=100 + i) for i, prompt in enumerate(prompts)]


def plain_logp(policy, request, response, temperature):
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    token_1T = torch.tensor([[*request.prompt_tokens, *response.tokens]])
    with torch.no_grad():
        logits_TV = model(token_1T).logits[0, len(request.prompt_tokens) - 1 : -1].float()
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logp_TV.gather(1, token_1T[0, len(request.prompt_tokens) :, None])[:, 0]


def worst(policy, requests, responses, temperature):
    """Largest difference of a reported log-probability from that of a plain forward."""
    return max(
        (torch.tensor(b.logp) - plain_logp(policy, a, b, temperature)).abs().max().item()
        for a, b in zip(requests, responses, strict=True)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_logp_and_weight_change(engine, policies, tied):
    params = SamplingParams(temperature=0.8, max_response_len=20, ignore_eos=True)
    requests = requests_of([*RAGGED, LONG, LONG])
    engine.load(policies[tied, 1])
    first = engine.sample(requests, params)
    assert worst(policies[tied, 1], requests, first, 0.8) < 1e-3
    assert first[-1].tokens != first[-2].tokens
    live = engine._llm
    engine.load(policies[tied, 2])
    assert engine._llm is live  # the weights went into it; nothing was started
    second = engine.sample(requests, params)
    assert worst(policies[tied, 2], requests, second, 0.8) < 1e-3
    assert worst(policies[tied, 1], requests, second, 0.8) > 0.1


def test_stale_prefix_cache_would_be_caught(engine, policies):
    params = SamplingParams(max_response_len=4, ignore_eos=True)
    requests = requests_of([LONG])
    engine.load(policies[False, 1])
    engine.sample(requests, params)
    reload = {"weights_path": str(policies[False, 2])}
    engine._llm.collective_rpc("reload_weights", kwargs=reload)
    stale = engine.sample(requests, params)
    assert worst(policies[False, 2], requests, stale, 1.0) > 0.1
    engine._llm.reset_prefix_cache()
    fresh = engine.sample(requests, params)
    assert worst(policies[False, 2], requests, fresh, 1.0) < 1e-3


def test_tied_head_that_is_not_published_restarts(engine, policies, make_model):
    engine.load(policies[True, 1])
    before = engine._llm
    policy = make_model(seed=5)
    engine.load(policy)
    assert engine._llm is not before
    requests = requests_of(RAGGED)
    responses = engine.sample(requests, SamplingParams(max_response_len=8, ignore_eos=True))
    assert worst(policy, requests, responses, 1.0) < 1e-3


def test_greedy_is_that_of_the_other_engine(engine, policies):
    params = SamplingParams(temperature=0, max_response_len=24)
    requests = requests_of(RAGGED)
    for policy in (policies[True, 1], policies[False, 1]):
        engine.load(policy)
        other = TransformersEngine(device="cpu")
        other.load(policy)
        mine, theirs = engine.sample(requests, params), other.sample(requests, params)
        assert [(x.tokens, x.finish_reason) for x in mine] == [
            (x.tokens, x.finish_reason) for x in theirs
        ]
        for a, b in zip(mine, theirs, strict=True):
            assert a.logp == pytest.approx(b.logp, abs=1e-3)


def test_seeds_fix_responses_in_any_batch(engine, policies):
    engine.load(policies[True, 1])
    params = SamplingParams(max_response_len=16, ignore_eos=True)
    requests = requests_of(RAGGED * 2)
    together = engine.sample(requests, params)
    backwards = engine.sample(requests[::-1], params)[::-1]
    assert [x.tokens for x in together] == [x.tokens for x in backwards]
    assert len({tuple(x.tokens) for x in together}) == len(requests)
    assert engine.sample(requests[4:5], params)[0].tokens == together[4].tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_p=0.6, max_response_len=12, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=3, max_response_len=12, ignore_eos=True),
        SamplingParams(
            temperature=0.9, min_tokens=5, max_response_len=12, stop_token_ids=tuple(range(40, 258))
        ),
        SamplingParams(
            temperature=0, min_tokens=5, max_response_len=12, stop_token_ids=tuple(range(40, 258))
        ),
    ],
)
def test_logp_is_of_the_full_vocabulary(engine, policies, params):
    engine.load(policies[True, 1])
    requests = requests_of(RAGGED)
    responses = engine.sample(requests, params)
    assert worst(policies[True, 1], requests, responses, params.temperature or 1.0) < 1e-3
    for response in responses:
        assert not set(response.tokens[: params.min_tokens]) & {*params.stop_token_ids}
        assert len(response.tokens) > params.min_tokens
    plain = SamplingParams(temperature=0.7, max_response_len=12, ignore_eos=True)
    assert worst(policies[True, 1], requests, engine.sample(requests, plain), 0.7) < 1e-3


def test_ends_are_those_of_the_other_engine(engine, policies):
    policy = policies[True, 1]
    engine.load(policy)
    other = TransformersEngine(device="cpu")
    other.load(policy)
    requests = requests_of(RAGGED)
    whole = SamplingParams(temperature=0, max_response_len=24, ignore_eos=True)
    tokens = engine.sample(requests, whole)[1].tokens
    text = other._tokenizer.decode(tokens)
    for changes in (
        {"stop_token_ids": (tokens[4],)},
        {"stop": (text[3:5],)},
        {"stop": (text[3:5],), "min_tokens": 9},
        {"stop": (text[0],), "min_tokens": 1},
        {"stop_token_ids": (tokens[0], tokens[2]), "min_tokens": 2},
        {"max_context_len": 12},
    ):
        params = SamplingParams(temperature=0, max_response_len=24, **changes)
        mine, theirs = engine.sample(requests, params), other.sample(requests, params)
        assert [(x.tokens, x.finish_reason) for x in mine] == [
            (x.tokens, x.finish_reason) for x in theirs
        ], changes


def test_limits_and_empty_responses_are_data(engine, policies):
    engine.load(policies[True, 1])
    requests = requests_of([(5,) * 250, (5,) * 256, (5,) * 300, (5, 6)])
    responses = engine.sample(requests, SamplingParams(max_response_len=10, ignore_eos=True))
    assert [len(response.tokens) for response in responses] == [6, 0, 0, 10]
    assert engine.sample(requests[:1], SamplingParams(max_response_len=0))[0].tokens == []
    assert engine.sample([], SamplingParams()) == []
    # A minimum beyond the limit: the whole response is the minimum.
    params = SamplingParams(max_response_len=4, min_tokens=9)
    assert [len(x.tokens) for x in engine.sample(requests[3:], params)] == [4]


def test_batches_at_the_same_time_come_as_they_end(engine, policies):
    engine.load(policies[True, 1])
    params = SamplingParams(max_response_len=40, ignore_eos=True, max_context_len=48)
    # The first has the most room and ends last; the second has none.
    batches = [
        requests_of([(5,) * 8]),
        requests_of([(5,) * 60]),
        requests_of([(5,) * 40, (6,) * 44]),
    ]
    found = list(engine.sample_batches(batches, params))
    assert [place for place, _ in found] == [1, 2, 0]
    assert [[len(x.tokens) for x in responses] for _, responses in found] == [[0], [8, 4], [40]]
    for place, responses in found:
        alone = engine.sample(batches[place], params)
        assert [x.tokens for x in responses] == [x.tokens for x in alone]


def test_batches_that_nobody_waits_for_are_given_up(engine, policies):
    engine.load(policies[True, 1])
    params = SamplingParams(max_response_len=200, ignore_eos=True, max_context_len=202)
    found = engine.sample_batches([requests_of([(5,)]), requests_of([(5,) * 201])], params)
    assert next(found)[0] == 1
    found.close()
    assert not engine._llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(("asked", "given"), [(64, 64), (1000, 256)])
def test_the_cache_holds_what_will_be_asked_for(policies, asked, given):
    engine = VLLMEngine(max_model_len=asked)
    try:
        engine.load(policies[True, 1])
        assert engine._llm.model_config.max_model_len == given
        (response,) = engine.sample(
            [Request((5,) * 60, seed=1)], SamplingParams(max_response_len=400, ignore_eos=True)
        )
        assert len(response.tokens) == given - 60
    finally:
        engine.close()


@pytest.mark.parametrize(("is_cut", "runner"), [(True, "0"), (False, None)])
def test_a_cut_distribution_asks_for_the_runner_that_reports_the_whole(
    policies, monkeypatch, is_cut, runner
):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "so that it is put back")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    seen = {}

    class Started:
        def __init__(self, **options):
            seen["runner"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")

    monkeypatch.setattr("relax.engines.vllm._vllm", lambda _: SimpleNamespace(LLM=Started))
    VLLMEngine(is_cut=is_cut).load(policies[True, 1])
    assert seen["runner"] == runner


def test_a_runner_that_cannot_report_is_told():
    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(sampler=SimpleNamespace(logprobs_mode="x"))
    extension.report_logp_of(None)
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0 or leave them unset"):
        extension.report_logp_of(1.0)


def test_nan_is_named(engine, policies, tmp_path):
    policy = shutil.copytree(policies[False, 1], tmp_path / "nan")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = float("nan")
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    engine.load(policy)
    with pytest.raises(ArtifactError, match="not finite for request 1, 2; the policy has div"):
        engine.sample(requests_of([(5,), (6, 77), (77,)]), SamplingParams(max_response_len=1))


def test_policy_that_is_not_whole_leaves_the_engine_as_it_was(engine, policies, tmp_path):
    engine.load(policies[True, 1])
    policy = shutil.copytree(policies[True, 2], tmp_path / "cut")
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ArtifactError, match="its header says"):
        engine.load(policy)
    params = SamplingParams(max_response_len=4)
    assert len(engine.sample(requests_of(RAGGED), params)) == len(RAGGED)
