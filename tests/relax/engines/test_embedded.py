import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax.engines import Request, SamplingParams, decode_attention
from relax.engines.embedded import TransformersEngine
from relax.errors import ArtifactError, ConfigError

EOS = 1
RAGGED = [tuple(range(10, 10 + length)) for length in (3, 11, 1, 7, 7, 5)]
ARCHITECTURES = {
    "qwen3": {},
    "untied llama": {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "sliding gemma2": {"model_type": "gemma2", "sliding_window": 4},
    "learned positions opt": {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt_neox": {"model_type": "gpt_neox", "tie_word_embeddings": False},
    "mixture mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "alibi bloom": {"model_type": "bloom", "n_layer": 2, "n_head": 4},
    "linear attention lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}


def opened(policy, **options):
    engine = TransformersEngine(device="cpu", **options)
    engine.load(policy)
    return engine


@pytest.fixture(scope="module")
def engine(tiny):
    return opened(tiny)


def requests_of(prompts):
    return [Request(prompt, seed=100 + i) for i, prompt in enumerate(prompts)]


def plain_logp(policy, request, response, temperature):
    """The same from one plain forward pass over prompt + response, without cache or padding."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    token_1T = torch.tensor([[*request.prompt_tokens, *response.tokens]])
    with torch.no_grad():
        logits_TV = model(token_1T).logits[0, len(request.prompt_tokens) - 1 : -1].float()
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logp_TV.gather(1, token_1T[0, len(request.prompt_tokens) :, None])[:, 0]


def assert_logp_is_plain(policy, requests, responses, temperature):
    for request, response in zip(requests, responses, strict=True):
        want = plain_logp(policy, request, response, temperature)
        assert torch.allclose(torch.tensor(response.logp), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logp_is_that_of_a_plain_forward(make_model, name):
    policy = make_model(**ARCHITECTURES[name])
    params = SamplingParams(temperature=0.8, max_response_len=20, ignore_eos=True)
    for prompts in (RAGGED, [(9, 8, 7)] * 3):
        requests = requests_of(prompts)
        responses = opened(policy).sample(requests, params)
        assert [len(response.tokens) for response in responses] == [20] * len(prompts)
        assert_logp_is_plain(policy, requests, responses, 0.8)


@pytest.mark.parametrize("model_type", sorted(decode_attention.TYPES))
def test_every_type_whose_heads_are_folded(make_model, model_type):
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    policy = make_model(model_type, moe_intermediate_size=32, **experts)
    engine, requests = opened(policy), requests_of(RAGGED)
    assert engine._model.config._attn_implementation == decode_attention.NAME
    responses = engine.sample(requests, SamplingParams(max_response_len=12, ignore_eos=True))
    assert_logp_is_plain(policy, requests, responses, 1.0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_that_end_leave_the_others_alone(make_model, name):
    policy = make_model(**ARCHITECTURES[name])
    params = SamplingParams(max_response_len=40, stop_token_ids=tuple(range(100, 140)))
    requests = requests_of(RAGGED * 3)
    responses = opened(policy).sample(requests, params)
    lengths = {len(response.tokens) for response in responses}
    assert len(lengths) > 4
    assert min(lengths) < 6
    assert_logp_is_plain(policy, requests, responses, 1.0)


def test_response_does_not_depend_on_its_batch(engine):
    params = SamplingParams(max_response_len=30)
    requests = requests_of(RAGGED * 2)
    together = engine.sample(requests, params)
    backwards = engine.sample(requests[::-1], params)[::-1]
    alone = [engine.sample([request], params)[0] for request in requests]
    assert len({tuple(response.tokens) for response in together}) == len(requests)
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
        assert a.logp == pytest.approx(b.logp, abs=1e-5)
        assert a.logp == pytest.approx(c.logp, abs=1e-5)


def test_same_call_is_bitwise_the_same_and_batches_are_cut(tiny, engine):
    params = SamplingParams(max_response_len=12)
    requests = requests_of(RAGGED * 2)
    first = engine.sample(requests, params)
    assert engine.sample(requests, params) == first
    for options in ({"max_rows": 5}, {"max_batch_tokens": 50}):
        cut = opened(tiny, **options).sample(requests, params)
        assert [x.tokens for x in cut] == [x.tokens for x in first]


def test_longer_limit_continues_the_same_response(engine):
    requests = requests_of([(5, 6, 7)] * 4)
    short = engine.sample(requests, SamplingParams(max_response_len=5, ignore_eos=True))
    long = engine.sample(requests, SamplingParams(max_response_len=9, ignore_eos=True))
    assert [x.tokens[:5] for x in long] == [x.tokens for x in short]


def test_greedy_is_that_of_generate(tiny, engine):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_response_len=25)
    requests = requests_of(RAGGED)
    responses = engine.sample(requests, params)
    for request, response in zip(requests, responses, strict=True):
        prompt_1T = torch.tensor([request.prompt_tokens])
        want = model.generate(prompt_1T, do_sample=False, max_new_tokens=25, pad_token_id=0)
        assert response.tokens == want[0, prompt_1T.shape[1] :].tolist()
    assert_logp_is_plain(tiny, requests, responses, 1.0)


def test_first_token_frequencies(tiny, engine):
    requests = [Request((5, 6, 7), seed) for seed in range(4000)]
    responses = engine.sample(requests, SamplingParams(temperature=0.5, max_response_len=1))
    counts = torch.bincount(torch.tensor([x.tokens[0] for x in responses]), minlength=258) / 4000
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        want = torch.softmax(model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.5, dim=-1)
    assert want.max() > 0.05
    assert (counts - want).abs().max() < 0.02


def test_truncated_sampling_keeps_the_full_logp(tiny, engine):
    requests = requests_of(RAGGED * 4)
    top_1 = engine.sample(requests, SamplingParams(top_k=1, max_response_len=8))
    greedy = engine.sample(requests, SamplingParams(temperature=0, max_response_len=8))
    assert [x.tokens for x in top_1] == [x.tokens for x in greedy]
    params = SamplingParams(temperature=1.5, top_p=0.5, max_response_len=8, ignore_eos=True)
    responses = engine.sample(requests, params)
    assert len({tuple(x.tokens) for x in responses}) > 12
    assert_logp_is_plain(tiny, requests, responses, 1.5)


def end_token_of(engine, prompt, position):
    """A token that the response to `prompt` with seed 0 has at `position` for the first time."""
    (response,) = engine.sample(
        [Request(prompt, 0)], SamplingParams(max_response_len=30, ignore_eos=True)
    )
    assert response.tokens.index(response.tokens[position]) == position
    return response.tokens, response.tokens[position]


def test_stop_token_ends_the_response(engine):
    tokens, end = end_token_of(engine, (5, 6, 7), 3)
    params = SamplingParams(max_response_len=30, stop_token_ids=(end,))
    (response,) = engine.sample([Request((5, 6, 7), 0)], params)
    assert response.tokens == tokens[:4]
    assert response.finish_reason == "stop"
    params = SamplingParams(max_response_len=4, stop_token_ids=(end,))
    assert engine.sample([Request((5, 6, 7), 0)], params)[0].finish_reason == "stop"
    params = SamplingParams(max_response_len=3, stop_token_ids=(end,))
    assert engine.sample([Request((5, 6, 7), 0)], params)[0].finish_reason == "length"


def test_eos_ends_the_response_unless_ignored(tiny, tmp_path):
    tokens, end = end_token_of(opened(tiny), (5, 6, 7), 2)
    policy = shutil.copytree(tiny, tmp_path / "policy")
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, EOS]}))
    engine = opened(policy)
    params = SamplingParams(max_response_len=10)
    assert engine.sample([Request((5, 6, 7), 0)], params)[0].tokens == tokens[:3]
    params = SamplingParams(max_response_len=10, ignore_eos=True)
    assert engine.sample([Request((5, 6, 7), 0)], params)[0].tokens == tokens[:10]


def test_min_tokens_forbids_end_tokens(tiny, engine):
    ends = tuple(range(50, 258))
    requests = requests_of(RAGGED * 4)
    params = SamplingParams(max_response_len=20, stop_token_ids=ends, min_tokens=6)
    responses = engine.sample(requests, params)
    assert min(len(response.tokens) for response in responses) == 7
    for response in responses:
        assert not set(response.tokens[:6]) & {EOS, *ends}
    assert_logp_is_plain(tiny, requests, responses, 1.0)


def test_stop_string_ends_with_the_token_that_completed_it(engine):
    params = SamplingParams(max_response_len=30, ignore_eos=True)
    (whole,) = engine.sample([Request((5, 6, 7), 0)], params)
    decode = engine._tokenizer.decode
    tokens = whole.tokens
    at = next(i for i in range(4, 25) if decode(tokens[i : i + 2]).isascii())
    stop = decode(tokens[at : at + 2])
    first = next(i for i in range(30) if stop in decode(tokens[: i + 1]))
    params = SamplingParams(max_response_len=30, ignore_eos=True, stop=(stop,))
    (response,) = engine.sample([Request((5, 6, 7), 0)], params)
    assert response.tokens == tokens[: first + 1]
    assert response.finish_reason == "stop"


def test_limits_and_empty_responses_are_data(engine):
    requests = requests_of([(5,) * 250, (5,) * 256, (5,) * 300, (5, 6)])
    responses = engine.sample(requests, SamplingParams(max_response_len=10, ignore_eos=True))
    assert [len(response.tokens) for response in responses] == [6, 0, 0, 10]
    assert {response.finish_reason for response in responses} == {"length"}
    params = SamplingParams(max_response_len=10, max_context_len=9, ignore_eos=True)
    assert len(engine.sample(requests[3:], params)[0].tokens) == 7
    assert engine.sample(requests[3:], SamplingParams(max_response_len=0))[0].tokens == []
    assert engine.sample([], SamplingParams()) == []


def test_bad_prompts_are_named(engine):
    with pytest.raises(ArtifactError, match="request 1: prompt_tokens is empty"):
        engine.sample([Request((1,), 0), Request((), 0)], SamplingParams())
    with pytest.raises(ArtifactError, match=r"request 0: prompt token 258 .* vocabulary of 258"):
        engine.sample([Request((258,), 0)], SamplingParams())


def changed(policy, directory, change):
    """A copy of `policy` whose tensors `change` has edited in place."""
    shutil.copytree(policy, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_nan_logits_name_the_requests(tiny, tmp_path):
    def poison(tensors):
        tensors["model.embed_tokens.weight"][77] = float("nan")

    # A tied head makes every logit NaN; an untied one only where the token is read.
    engine = opened(changed(tiny, tmp_path / "nan", poison))
    with pytest.raises(ArtifactError, match="logits are not finite at response token 0 of requ"):
        engine.sample(requests_of([(5,), (6,)]), SamplingParams())


def test_nan_names_only_the_requests_that_have_it(make_model, tmp_path):
    def poison(tensors):
        tensors["model.embed_tokens.weight"][77] = float("nan")

    policy = changed(make_model(tie_word_embeddings=False), tmp_path / "nan", poison)
    requests = requests_of([(5,), (6, 77), (7, 8, 9), (77,)])
    with pytest.raises(ArtifactError, match="token 0 of request 1, 3; the policy has diverged"):
        opened(policy).sample(requests, SamplingParams(max_response_len=1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["published", "left out"])
def test_second_load_swaps_weights(make_model, tmp_path, tied, head):
    def publish(tensors):
        if tied and head == "published":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        elif not tied and head == "left out":
            del tensors["lm_head.weight"]

    first = make_model(seed=1, tie_word_embeddings=tied)
    second = changed(make_model(seed=2, tie_word_embeddings=tied), tmp_path / "second", publish)
    engine = opened(first)
    model = engine._model
    if not tied and head == "left out":
        with pytest.raises(ArtifactError, match=r"tensor lm_head\.weight is missing; publish it"):
            engine.load(second)
        with pytest.raises(ArtifactError, match="no policy is loaded"):
            engine.sample(requests_of(RAGGED), SamplingParams())
        return
    engine.load(second)
    assert engine._model is model
    requests = requests_of(RAGGED)
    responses = engine.sample(requests, SamplingParams(max_response_len=10, ignore_eos=True))
    assert_logp_is_plain(second, requests, responses, 1.0)
    assert responses == opened(second).sample(
        requests, SamplingParams(max_response_len=10, ignore_eos=True)
    )


def test_end_tokens_follow_a_policy_whose_weights_alone_are_swapped(make_model, tmp_path):
    first = make_model(seed=1)
    second = changed(first, tmp_path / "second", lambda tensors: None)
    described = json.loads((second / "generation_config.json").read_text())
    described["eos_token_id"] = [EOS, 77]
    (second / "generation_config.json").write_text(json.dumps(described))
    engine = opened(first)
    model, tokenizer = engine._model, engine._tokenizer
    engine.load(first)
    assert (engine._model, engine._tokenizer, engine._eos_ids) == (model, tokenizer, (EOS,))
    engine.load(second)
    assert (engine._model, engine._eos_ids) == (model, (EOS, 77))
    assert engine._tokenizer is not tokenizer


def test_stale_tied_head_is_refused(make_model, tmp_path):
    def stale(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    policy = changed(make_model(seed=2), tmp_path / "stale", stale)
    engine = opened(make_model(seed=1))
    with pytest.raises(ArtifactError, match="differs from the weight it is tied to"):
        engine.load(policy)
    with pytest.raises(ArtifactError, match="differs from the weight it is tied to"):
        opened(policy)


def test_another_architecture_is_built_anew(make_model, tiny):
    engine = opened(tiny)
    engine.load(make_model("llama"))
    assert type(engine._model).__name__ == "LlamaForCausalLM"


def test_missing_weight_is_refused_at_first_load(make_model, tmp_path):
    def lose(tensors):
        del tensors["model.norm.weight"]

    policy = changed(make_model(), tmp_path / "lost", lose)
    with pytest.raises(ArtifactError, match=r"1 weights .* missing, first model.norm.weight"):
        opened(policy)


def test_a_weight_of_another_shape_is_named_with_both(make_model, tmp_path):
    def widen(tensors):
        tensors["model.norm.weight"] = torch.zeros(7)

    policy = changed(make_model(), tmp_path / "wide", widen)
    with pytest.raises(ArtifactError, match=r"norm.weight has shape \[7\]; config.json wants \["):
        opened(policy)


def test_stop_strings_need_a_tokenizer(tiny, tmp_path):
    policy = tmp_path / "bare"
    policy.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(tiny / name, policy / name)
    engine = opened(policy)
    assert len(engine.sample([Request((5,), 0)], SamplingParams(max_response_len=2))) == 1
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        engine.sample([Request((5,), 0)], SamplingParams(stop=("x",)))
