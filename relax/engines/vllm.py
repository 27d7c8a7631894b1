"""The engine `vllm`: vLLM inside this process; weights of a new policy go into the live engine.

Shape letters: B rows of the batch, V vocabulary.
"""

import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax.engines import published
from relax.engines.batches import whole_batches
from relax.engines.protocol import Request, Response, SamplingParams
from relax.engines.stopping import check_prompts, check_stop, response_limits
from relax.errors import ArtifactError, ConfigError
from relax.model_dir import has_tokenizer, read_config, weight_files

# Read by vLLM when it is imported; what the user has set stays.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: starts in 3 s, not 30
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first call compiles for 8-32 s
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# The sampler of vLLM's second model runner reports no log-probabilities but those of what is left
# after top-k, top-p and min_tokens (at the temperature), or of the logits as they come.
_CUT_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


class VLLMEngine:
    """Samples with vLLM; float32 on a CPU, bfloat16 on GPUs.

    `max_model_len` is the longest prompt + response that will be asked for: what the cache must
    hold at least, and the model's own limit (0) may be more than a GPU has room for. `is_cut` says
    whether some call will ask for less than the whole distribution (SamplingParams.is_cut).
    `engine_options` go to `vllm.LLM` as they are (gpu_memory_utilization, max_num_seqs, ...).
    A response is fixed by its request's seed whatever its batch, up to the rounding of logits.
    vLLM replaces `torch.set_num_threads` in this process by a function that does nothing.
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        max_model_len: int = 0,
        is_cut: bool = False,
        **engine_options: object,
    ) -> None:
        self._is_cpu = not torch.cuda.is_available()
        self._max_model_len, self._is_cut = max_model_len, is_cut
        self._options = {
            "dtype": "float32" if self._is_cpu else "bfloat16",
            "enforce_eager": self._is_cpu,
            "tensor_parallel_size": tensor_parallel_size,
            # Temperature included; the raw mode leaves it out.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "relax.engines.vllm.WorkerExtension",
            "disable_log_stats": True,
            **engine_options,
        }
        self._llm: Any = None

    def load(self, policy: Path) -> None:
        """Take the weights in `policy`: into the live engine where the architecture is the same.

        A policy whose tied head is not published explicitly restarts the engine: vLLM's reload
        would keep the old head without a word.

        Raises:
            ArtifactError: the directory is not whole.
        """
        names = frozenset().union(*weight_files(policy).values())
        config = read_config(policy)
        tokenizer = published.load_tokenizer(policy)
        eos_ids = published.end_token_ids(policy, tokenizer)
        if (
            self._llm is not None
            and published.same_architecture(config, self._config)
            and "lm_head.weight" in names
            and (self._tokenizer is None) == (tokenizer is None)
        ):
            self._reload(policy)
        else:
            self.close()
            self._llm = self._start(policy)
        self._policy, self._config, self._eos_ids = policy, config, eos_ids
        self._tokenizer = tokenizer

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Response]:
        """Sample one response a request, in the order of the requests.

        Raises:
            ArtifactError: no policy loaded, a prompt that is not the model's, or log-probabilities
                that are not finite (naming the requests).
            ConfigError: stop strings with a policy that has no tokenizer.
        """
        ((_, responses),) = self.sample_batches([requests], params)
        return responses

    def sample_batches(
        self, batches: Sequence[Sequence[Request]], params: SamplingParams
    ) -> Iterator[tuple[int, list[Response]]]:
        """Sample all batches at the same time; each comes with its place when its last one ends.

        Raises what `sample` raises.
        """
        if self._llm is None:
            raise ArtifactError("engine vllm: no policy is loaded; call load first")
        check_stop(params, self._tokenizer, self._policy)
        requests = [request for batch in batches for request in batch]
        model_config = self._llm.model_config
        check_prompts(requests, model_config.get_vocab_size())
        limits = response_limits(requests, params, model_config.max_model_len)
        answers = self._answers(requests, limits, params)
        yield from whole_batches(batches, limits, answers, self._policy)

    def close(self) -> None:
        """Shut vLLM down and give back its memory."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        _vllm("vllm.distributed").cleanup_dist_env_and_memory()
        gc.collect()

    def _reload(self, policy: Path) -> None:
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(policy)})
            # No reload does this, and cached prefixes are of the old weights.
            if not self._llm.reset_prefix_cache():
                raise ArtifactError(f"engine vllm: prefix cache in use while loading {policy}")
        except BaseException:
            self.close()  # it may hold half of each version
            raise

    def _start(self, policy: Path) -> Any:
        cpu, cut = _CPU_ENVIRONMENT, _CUT_ENVIRONMENT
        wanted = _ENVIRONMENT | (cpu if self._is_cpu else {}) | (cut if self._is_cut else {})
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
        options = {"skip_tokenizer_init": not has_tokenizer(policy), **self._options}
        # vLLM refuses more than the model's own limit; what does not fit is told by length.
        if 0 < self._max_model_len <= published.context_len(read_config(policy)):
            options["max_model_len"] = self._max_model_len
        return _vllm("vllm").LLM(model=str(policy), **options)

    def _answers(
        self, requests: Sequence[Request], limits: Sequence[int], params: SamplingParams
    ) -> Iterator[tuple[int, Response]]:
        """(number of the request, response) as they are finished, of those that have room."""
        asked = [i for i, limit in enumerate(limits) if limit > 0]
        if not asked:
            return
        temperature = (params.temperature or 1.0) if params.is_cut else None
        self._llm.collective_rpc("report_logp_of", args=(temperature,))
        engine = self._llm.llm_engine
        ids = self._llm.enqueue(
            [{"prompt_token_ids": list(requests[i].prompt_tokens)} for i in asked],
            [self._vllm_params(requests[i].seed, limits[i], params) for i in asked],
            use_tqdm=False,
        )
        # Outputs have the name without the letters that vLLM adds to make it unique.
        number_of = {name.partition("-")[0]: i for name, i in zip(ids, asked, strict=True)}
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield number_of.pop(output.request_id), _response(output.outputs[0])
        finally:
            if number_of:
                engine.abort_request(list(number_of))

    def _vllm_params(self, seed: int, limit: int, params: SamplingParams) -> Any:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        return _vllm("vllm").SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed,
            max_tokens=limit,
            # vLLM refuses more; the response is all minimum then.
            min_tokens=min(params.min_tokens, limit),
            # One set of end tokens, the same as that of the other engines.
            ignore_eos=True,
            stop_token_ids=sorted(ends),
            stop=list(params.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(params.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=_vllm("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        )


class WorkerExtension:
    """Methods that vLLM mixes into its workers (`worker_extension_cls`)."""

    model_runner: Any

    def report_logp_of(self, temperature: float | None) -> None:
        """Choose the distribution whose log-probabilities are reported.

        None: the sampled one (vLLM's processed_logprobs), which is the full vocabulary's as long
        as top-k, top-p and min_tokens remove nothing. Else the softmax of logits / temperature
        over the full vocabulary, whatever was removed before sampling.

        Raises:
            ConfigError: a vLLM whose sampler cannot be told.
        """
        sampler = self.model_runner.sampler
        is_told = hasattr(sampler, "compute_logprobs") and hasattr(sampler, "topk_topp_sampler")
        if temperature is not None and not is_told:
            raise ConfigError(
                "engine vllm: top_p, top_k and min_tokens need log-probabilities that this vLLM's "
                "model runner cannot report; set the environment variable "
                "VLLM_USE_V2_MODEL_RUNNER=0 or leave them unset"
            )
        if is_told:
            mode = "processed_logprobs" if temperature is None else "raw_logprobs"
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
            sampler.compute_logprobs = partial(_tempered_logp, temperature=temperature or 1.0)


def _vllm(module: str) -> Any:
    """A module of vLLM, imported when an engine starts (8-11 s)."""
    return importlib.import_module(module)


def _tempered_logp(logits_BV: Tensor, *, temperature: float) -> Tensor:
    return torch.log_softmax(logits_BV.float() / temperature, dim=-1)


def _response(output: Any) -> Response:
    tokens = list(output.token_ids)
    logp = list(output.logprobs.logprobs)
    assert len(tokens) == len(logp)  # logprobs=0: the sampled token's and nothing else
    return Response(tokens, logp, "stop" if output.finish_reason == "stop" else "length")
