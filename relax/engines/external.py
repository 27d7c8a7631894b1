"""The engine `external`: vLLM servers that already run, over their OpenAI-compatible HTTP API."""

import json
import logging
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from relax.engines import published
from relax.engines.batches import whole_batches
from relax.engines.protocol import Request, Response, SamplingParams
from relax.engines.stopping import check_prompts, check_stop, response_limits
from relax.errors import ArtifactError, ConfigError
from relax.model_dir import read_config, weight_files

_log = logging.getLogger(__name__)

REQUESTS_PER_SERVER = 256
"""Requests that a server has at once: as many as vLLM batches by default (max_num_seqs)."""
HEALTH_TIMEOUT_S = 30.0

_FLAG = "rollout_external_engine_addrs"
_START = (
    "start each with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server "
    "--model POLICY --logprobs-mode processed_logprobs"
)


class ServerDown(Exception):
    """A server that does not answer, or answers that its engine is broken."""


class Server:
    """One vLLM server: JSON in, JSON out."""

    def __init__(self, address: str, api_key: str) -> None:
        self.address = address if "://" in address else f"http://{address}"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Servers are inside the cluster: a proxy from the environment is not meant.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float) -> Any:
        """GET `path`, or POST `body` to it.

        Raises:
            ServerDown: no answer in time, or a 5xx.
            ConfigError: a 4xx; another server would say the same.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {error.read(400).decode(errors='replace')}"
            if error.code >= 500:
                raise ServerDown(reason) from error
            hint = f"; {_START}" if error.code == 404 else ""
            raise ConfigError(f"{_FLAG}: {self.address}{path} refuses, {reason}{hint}") from error
        # OSError: refused, reset, timed out; the rest is a connection cut in the middle.
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise ServerDown(str(error) or type(error).__name__) from error
        return json.loads(content) if content else None


class ExternalEngine:
    """Samples on running vLLM servers; what one does not answer is asked of another.

    `addresses` are host:port or URLs. The servers see `policy` directories under the same path.
    A server that fails (no answer to a request within `timeout_s`, none to a health check within
    HEALTH_TIMEOUT_S, or a 5xx) is left out until the next `load`, because after a restart it
    would hold other weights. `api_key_variable` names the environment variable with their key.
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        timeout_s: float = 1800.0,
        api_key_variable: str = "",
    ) -> None:
        if not addresses:
            raise ConfigError(f"{_FLAG} = []; name at least one host:port")
        key = os.environ.get(api_key_variable, "") if api_key_variable else ""
        self._all = [Server(address, key) for address in addresses]
        self._timeout_s = timeout_s
        self._down: set[str] = set()  # addresses
        self._infos: dict[str, dict[str, Any]] = {}  # address -> vLLM's model_config

    def load(self, policy: Path) -> None:
        """Load the weights in `policy` into every server that answers.

        Raises:
            ArtifactError: the directory is not whole, or its tied head is not published (vLLM
                would keep the old one without a word).
            ConfigError: no server answers, or one was started without what this needs.
        """
        files = weight_files(policy)
        self._config = read_config(policy)
        if published.HEAD not in frozenset().union(*files.values()):
            raise ArtifactError(
                f"{policy}: {published.HEAD} is not published; a live vLLM server would keep the "
                "old head, write it explicitly also where it is tied"
            )
        self._policy = policy.resolve()
        self._down.clear()
        self._infos.clear()
        with ThreadPoolExecutor(len(self._all)) as pool:
            list(pool.map(self._load_one, self._all))
        if not self._live():
            addresses = ", ".join(server.address for server in self._all)
            raise ConfigError(f"{_FLAG}: none of {addresses} can be used; {_START}")
        self._tokenizer = published.load_tokenizer(policy)
        self._eos_ids = published.end_token_ids(policy, self._tokenizer)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Response]:
        """Sample one response a request, in the order of the requests.

        Raises:
            ArtifactError: no policy loaded, a prompt that is not the model's, or log-probabilities
                that are not finite (naming the requests).
            ConfigError: no server left (naming the request), or servers whose `--logprobs-mode`
                does not give the log-probabilities that `params` need.
        """
        ((_, responses),) = self.sample_batches([requests], params)
        return responses

    def sample_batches(
        self, batches: Sequence[Sequence[Request]], params: SamplingParams
    ) -> Iterator[tuple[int, list[Response]]]:
        """Sample all batches at the same time; each comes with its place when its last one ends.

        Raises what `sample` raises.
        """
        if not self._infos:
            raise ArtifactError("engine external: no policy is loaded; call load first")
        check_stop(params, self._tokenizer, self._policy)
        with ThreadPoolExecutor(len(self._all)) as pool:
            list(pool.map(self._check_one, self._live()))
        self._check_logp_mode(params)
        text_config = self._config.get("text_config", self._config)
        requests = [request for batch in batches for request in batch]
        check_prompts(requests, text_config["vocab_size"])
        context = min(info["max_model_len"] for info in self._infos.values())
        limits = response_limits(requests, params, context)
        answers = self._answers(requests, limits, params)
        yield from whole_batches(batches, limits, answers, self._policy)

    def close(self) -> None:
        """Forget the servers; they stay up."""
        self._infos.clear()

    def _live(self) -> list[Server]:
        return [server for server in self._all if server.address not in self._down]

    def _load_one(self, server: Server) -> None:
        """Health, configuration, weights, cache and version of one server."""
        path, timeout_s = str(self._policy), self._timeout_s
        try:
            server.call("/health", timeout_s=HEALTH_TIMEOUT_S)
            info = server.call("/server_info?config_format=json", timeout_s=timeout_s)
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            server.call("/collective_rpc", body, timeout_s=timeout_s)
            # No reload does this, and cached prefixes are of the old weights.
            if not server.call("/reset_prefix_cache", {}, timeout_s=timeout_s)["success"]:
                raise ServerDown("its prefix cache is in use; is another run sampling there?")
            server.call("/update_weight_version", {"new_version": path}, timeout_s=timeout_s)
        except ServerDown as error:
            self._leave_out(server, error)
        else:
            self._infos[server.address] = info["vllm_config"]["model_config"]

    def _check_one(self, server: Server) -> None:
        """Leave out a server that is down or whose weights are no longer those we loaded."""
        try:
            server.call("/health", timeout_s=HEALTH_TIMEOUT_S)
            answer = server.call("/weight_info", timeout_s=HEALTH_TIMEOUT_S)
            version = answer["weight_version"]
            if version != str(self._policy):
                raise ServerDown(f"it holds the weights {version!r} now, not {self._policy}")
        except ServerDown as error:
            self._leave_out(server, error)

    def _answers(
        self, requests: Sequence[Request], limits: Sequence[int], params: SamplingParams
    ) -> Iterator[tuple[int, Response]]:
        """(number of the request, response) as they are finished, of those that have room."""
        # Requests with the same prompt go to the same server, which keeps it in its cache.
        number = {p: i for i, p in enumerate(dict.fromkeys(x.prompt_tokens for x in requests))}
        pool = ThreadPoolExecutor(REQUESTS_PER_SERVER * len(self._all))
        try:
            asked = {
                pool.submit(self._ask, i, number, requests[i], limit, params): i
                for i, limit in enumerate(limits)
                if limit > 0
            }
            for answer in as_completed(asked):
                yield asked[answer], answer.result()
        finally:
            # Who was asked to stop, or found a fault, does not wait for requests on their way.
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self,
        index: int,
        number: Mapping[tuple[int, ...], int],
        request: Request,
        limit: int,
        params: SamplingParams,
    ) -> Response:
        """Ask the servers in turn, beginning with the prompt's own."""
        last: ServerDown | None = None
        first = number[request.prompt_tokens]
        for turn in range(len(self._all)):
            server = self._all[(first + turn) % len(self._all)]
            if server.address in self._down:
                continue
            body = self._body(server, request, limit, params)
            try:
                return _response(server.call("/v1/completions", body, timeout_s=self._timeout_s))
            except ServerDown as error:
                self._leave_out(server, error)
                last = error
        raise ConfigError(f"{_FLAG}: no server left for request {index} ({last}); start them again")

    def _body(
        self, server: Server, request: Request, limit: int, params: SamplingParams
    ) -> dict[str, object]:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        served = self._infos[server.address]["served_model_name"]
        return {
            "model": served[0] if isinstance(served, list) else served,
            "prompt": list(request.prompt_tokens),
            "seed": request.seed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": limit,
            "min_tokens": min(params.min_tokens, limit),
            # One set of end tokens, the same as that of the other engines.
            "ignore_eos": True,
            "stop_token_ids": sorted(ends),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _check_logp_mode(self, params: SamplingParams) -> None:
        """Full-vocabulary log-probs at the temperature, from what the servers were started with."""
        is_cut, is_tempered = params.is_cut, params.temperature not in (0, 1)
        if is_cut and is_tempered:
            raise ConfigError(
                f"{_FLAG}: a server has no log-probabilities of the full vocabulary for "
                f"top_p = {params.top_p}, top_k = {params.top_k}, min_tokens = {params.min_tokens} "
                f"at temperature = {params.temperature}; use the engine vllm or temperature 1"
            )
        wanted = {"raw_logprobs"} if is_cut else {"processed_logprobs"}
        if not is_cut and not is_tempered:
            wanted = {"raw_logprobs", "processed_logprobs"}
        for server in self._live():
            mode = self._infos[server.address]["logprobs_mode"]
            if mode not in wanted:
                raise ConfigError(
                    f"{_FLAG}: {server.address} runs with --logprobs-mode {mode}; these sampling "
                    f"parameters need {' or '.join(sorted(wanted))}"
                )

    def _leave_out(self, server: Server, error: ServerDown) -> None:
        _log.warning("%s: %s is left out: %s", _FLAG, server.address, error)
        self._down.add(server.address)


def _response(answer: dict[str, Any]) -> Response:
    (choice,) = answer["choices"]
    # JSON has no NaN: the server writes null.
    logp = [math.nan if x is None else x for x in choice["logprobs"]["token_logprobs"]]
    tokens = choice["token_ids"]
    assert len(tokens) == len(logp)
    return Response(tokens, logp, "stop" if choice["finish_reason"] == "stop" else "length")
