"""A fake server speaks vLLM's HTTP; test_external_vllm below asks a real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm_server import vllm_server

from relax.engines import Request, SamplingParams, open_engine
from relax.errors import ArtifactError, ConfigError


class FakeVLLM(ThreadingHTTPServer):
    """Answers each completion with its seed; `broken` paths get that HTTP status instead."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.broken = [], {}
        self.version, self.mode = "default", "processed_logprobs"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"

    def answer(self, path, body):
        self.asked.append((path, body))
        if path == "/update_weight_version":
            self.version = body["new_version"]
        model = {"max_model_len": 32, "served_model_name": "m", "logprobs_mode": self.mode}
        logp = None if body.get("seed") == 99 else -0.5
        choice = {
            "token_ids": [body.get("seed"), 1],
            "logprobs": {"token_logprobs": [logp, -0.25]},
            "finish_reason": "stop",
        }
        return {
            "/server_info": {"vllm_config": {"model_config": model}},
            "/reset_prefix_cache": {"success": True},
            "/weight_info": {"weight_version": self.version},
            "/v1/completions": {"choices": [choice]},
        }.get(path)


class Handler(BaseHTTPRequestHandler):
    server: FakeVLLM

    def do_GET(self):
        path = self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        status = self.server.broken.get(path, 200)
        content = json.dumps(self.server.answer(path, body)).encode() if status == 200 else b"no"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def servers():
    servers = [FakeVLLM(), FakeVLLM()]
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def policy(make_model):
    return make_model(tie_word_embeddings=False)


def opened(servers, policy):
    engine = open_engine("external", addresses=[x.address for x in servers], timeout_s=20)
    engine.load(policy)
    return engine


REQUESTS = [Request((5, 6 + i), seed=10 + i) for i in range(8)]


def test_load_and_sample(servers, policy):
    engine = opened(servers, policy)
    for server in servers:
        path = str(policy.resolve())
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        assert ("/collective_rpc", reload) in server.asked
        paths = [asked for asked, _ in server.asked]
        assert paths.index("/collective_rpc") < paths.index("/reset_prefix_cache")
    responses = engine.sample(REQUESTS, SamplingParams(temperature=0.5, max_response_len=50))
    assert [x.tokens for x in responses] == [[10 + i, 1] for i in range(8)]
    assert responses[0].logp == [-0.5, -0.25]
    bodies = [[b for p, b in x.asked if p == "/v1/completions"] for x in servers]
    assert [len(x) for x in bodies] == [4, 4]
    (body,) = [x for x in bodies[0] if x["seed"] == 10]
    assert body["prompt"] == [5, 6]
    assert (body["max_tokens"], body["temperature"], body["stop_token_ids"]) == (30, 0.5, [1])


@pytest.mark.parametrize("fault", ["5xx", "dead"])
def test_a_failing_server_is_left_out_and_another_asked(servers, policy, fault):
    engine = opened(servers, policy)
    if fault == "5xx":
        servers[0].broken["/v1/completions"] = 500
    else:
        servers[0].shutdown()
        servers[0].server_close()
    for _ in range(2):
        responses = engine.sample(REQUESTS, SamplingParams())
        assert [x.tokens[0] for x in responses] == [10 + i for i in range(8)]
    assert len([1 for path, _ in servers[1].asked if path == "/v1/completions"]) == 16


def test_no_server_left_names_the_request(servers, policy):
    engine = opened(servers, policy)
    for server in servers:
        server.broken["/v1/completions"] = 503
    with pytest.raises(ConfigError, match=r"addrs: no server left for request \d+ \("):
        engine.sample(REQUESTS, SamplingParams())


def test_restarted_server_with_other_weights_is_not_asked(servers, policy):
    engine = opened(servers, policy)
    servers[0].version = "default"
    engine.sample(REQUESTS, SamplingParams())
    assert not [1 for path, _ in servers[0].asked if path == "/v1/completions"]
    engine.load(policy)
    engine.sample(REQUESTS, SamplingParams())
    assert [1 for path, _ in servers[0].asked if path == "/v1/completions"]


def test_unusable_servers(servers, policy, make_model):
    with pytest.raises(ConfigError, match=r"rollout_external_engine_addrs = \[\]"):
        open_engine("external", addresses=[])
    engine = open_engine("external", addresses=[x.address for x in servers])
    with pytest.raises(ArtifactError, match="no policy is loaded"):
        engine.sample(REQUESTS, SamplingParams())
    with pytest.raises(ArtifactError, match=r"lm_head\.weight is not published"):
        engine.load(make_model())
    servers[0].broken["/server_info"] = 404
    with pytest.raises(ConfigError, match="refuses, HTTP 404: no; start each with VLLM_SERVER_DEV"):
        engine.load(policy)
    servers[0].broken.clear()
    for server in servers:
        server.broken["/health"] = 503
    with pytest.raises(ConfigError, match=r"none of http://127.* can be used; start each with"):
        engine.load(policy)


def test_logp_mode_must_fit_the_parameters(servers, policy):
    engine = opened(servers, policy)
    with pytest.raises(ConfigError, match="need raw_logprobs"):
        engine.sample(REQUESTS, SamplingParams(top_k=5))
    with pytest.raises(ConfigError, match="no log-probabilities of the full vocabulary for top_p"):
        engine.sample(REQUESTS, SamplingParams(temperature=0.5, min_tokens=3))
    for server in servers:
        server.mode = "raw_logprobs"
    engine.load(policy)
    assert len(engine.sample(REQUESTS, SamplingParams(top_k=5))) == 8
    with pytest.raises(ConfigError, match="need processed_logprobs"):
        engine.sample(REQUESTS, SamplingParams(temperature=0.5))


def test_nan_is_named(servers, policy):
    engine = opened(servers, policy)
    with pytest.raises(ArtifactError, match="not finite for request 8; the policy has diverged"):
        engine.sample([*REQUESTS, Request((7,), seed=99)], SamplingParams())


@pytest.fixture(scope="module")
def vllm_address(make_model):
    pytest.importorskip("vllm")
    with vllm_server(make_model()) as address:
        yield address


@pytest.mark.integration
def test_external_vllm(vllm_address, make_model, tmp_path):
    engine = open_engine("external", addresses=["127.0.0.1:9", vllm_address], timeout_s=60)
    other = open_engine("transformers", device="cpu")
    requests = [Request(tuple(range(10, 10 + n)), seed=n) for n in (3, 11, 1, 7)]
    for seed in (1, 2):
        policy = with_head(make_model(seed=seed))
        engine.load(policy)
        other.load(policy)
        greedy = SamplingParams(temperature=0, max_response_len=16)
        mine, theirs = engine.sample(requests, greedy), other.sample(requests, greedy)
        assert [x.tokens for x in mine] == [x.tokens for x in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert a.logp == pytest.approx(b.logp, abs=1e-3)
        warm = SamplingParams(temperature=0.7, max_response_len=16)
        first, again = engine.sample(requests, warm), engine.sample(requests, warm)
        assert [x.tokens for x in first] == [x.tokens for x in again]


def with_head(policy: Path) -> Path:
    tensors = load_file(policy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    return policy
