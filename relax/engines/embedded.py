"""The engine `transformers`: a lean cached decode loop over any AutoModelForCausalLM.

Shape letters: B rows of the batch, U distinct prompts, P prompt positions (left-padded),
K cached positions, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from relax.engines import choice, decode_attention, kv_cache, published, weights
from relax.engines.protocol import NotFiniteError, Request, Response, SamplingParams
from relax.engines.stopping import (
    StopStrings,
    check_prompts,
    check_stop,
    listed,
    response_limits,
)
from relax.errors import ArtifactError, ConfigError
from relax.model_dir import read_config, weight_files


@dataclass
class Batch:
    """A batch in flight; `request_B` numbers the request that each row answers."""

    request_B: np.ndarray
    is_alive_B: np.ndarray
    cache: DynamicCache
    mask_BK: Tensor | None  # None where no row has padding
    position_B1: Tensor
    num_cached: int


class TransformersEngine:
    """Samples in this process with transformers; float32 on a CPU, bfloat16 on a GPU.

    `max_rows` and `max_batch_tokens` (rows * (prompt + response), what the cache may grow to)
    bound a batch; more requests are taken in several batches, longest prompts last. The same
    requests always make the same batches, so that a repeated call is bitwise the same; in another
    batch a response differs at most by the rounding of its logits.
    """

    def __init__(
        self, *, device: str | None = None, max_rows: int = 256, max_batch_tokens: int = 262_144
    ) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._model: Any = None

    def load(self, policy: Path) -> None:
        """Take the weights in `policy`, in place where the architecture is the loaded one.

        Raises:
            ArtifactError: the directory is not whole or its tensors are not the model's.
        """
        files = weight_files(policy)
        config, companions = read_config(policy), published.companions_digest(policy)
        # Whatever fails from here on leaves the engine empty, never half of each version.
        model, self._model = self._model, None
        is_other = model is None or companions != self._companions
        if (
            model is not None
            and published.same_architecture(config, self._config)
            and weights.has_names(model, files)
        ):
            weights.swap(model, files)
        else:
            model = weights.build(policy, self._dtype, self._device)
        if is_other:
            self._signature = set(inspect.signature(model.forward).parameters)
            _check_causal(policy, self._signature)
            self._tokenizer = published.load_tokenizer(policy)
            self._eos_ids = published.end_token_ids(policy, self._tokenizer)
        self._policy, self._config, self._companions = policy, config, companions
        self._model = model

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Response]:
        """Sample one response a request, in the order of the requests.

        Raises:
            ArtifactError: no policy loaded, a prompt that is not the model's, or logits that are
                not finite (naming the requests).
            ConfigError: stop strings with a policy that has no tokenizer.
        """
        if self._model is None:
            raise ArtifactError("engine transformers: no policy is loaded; call load first")
        check_stop(params, self._tokenizer, self._policy)
        check_prompts(requests, self._model.get_input_embeddings().num_embeddings)
        limits = response_limits(requests, params, published.context_len(self._config))
        responses = [Response([], [], "length") for _ in requests]
        for batch in self._batches(requests, limits):
            with torch.inference_mode():
                decoding = _Decoding(self, [requests[i] for i in batch], params)
                done = decoding.run(np.array([limits[i] for i in batch]), np.array(batch))
            for index, response in zip(batch, done, strict=True):
                responses[index] = response
        return responses

    def sample_batches(
        self, batches: Sequence[Sequence[Request]], params: SamplingParams
    ) -> Iterator[tuple[int, list[Response]]]:
        """Sample one batch after another: each is bitwise what `sample` gives for it alone."""
        for place, requests in enumerate(batches):
            yield place, self.sample(requests, params)

    def close(self) -> None:
        """Forget the model."""
        self._model = None

    def _batches(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        """Cut the requests that have room for a response into batches of like prompt lengths."""
        order = [i for i in range(len(requests)) if limits[i] > 0]
        order.sort(key=lambda i: len(requests[i].prompt_tokens))
        batches: list[list[int]] = []
        longest = 0
        for index in order:
            size = len(requests[index].prompt_tokens) + limits[index]
            longest = max(longest, size)
            rows = len(batches[-1]) + 1 if batches else 0
            if not batches or rows > self._max_rows or rows * longest > self._max_batch_tokens:
                batches.append([])
                longest = size
            batches[-1].append(index)
        return batches


class _Decoding:
    """One batch from its prompts to its responses."""

    def __init__(
        self, engine: TransformersEngine, requests: Sequence[Request], params: SamplingParams
    ) -> None:
        self._engine = engine
        self._model = engine._model
        self._device = engine._device
        self._requests = requests
        self._params = params
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(engine._eos_ids))
        vocab_size = self._model.get_input_embeddings().num_embeddings
        self._end_ids = np.array(sorted(x for x in ends if 0 <= x < vocab_size), dtype=np.int64)
        self._stop = StopStrings(engine._tokenizer, params.stop) if params.stop else None
        self._logits_kept = {"logits_to_keep": 1} if "logits_to_keep" in engine._signature else {}

    def run(self, limit_B: np.ndarray, request_id_B: np.ndarray) -> list[Response]:
        """Decode until every row has ended; `request_id_B` are the caller's numbers, for errors."""
        params = self._params
        record = _Record(len(self._requests), self._stop is not None)
        batch, logits_BV = self._prefill(int(limit_B.max()))
        position = 0
        while True:
            uniform_B = self._uniforms(position, batch.request_B)
            forbidden = self._end_ids if position < params.min_tokens else self._end_ids[:0]
            token_B, logp_B = choice.choose(logits_BV, uniform_B, params, forbidden.tolist())
            # The only wait for the device in a step.
            tokens, logp = token_B.cpu().numpy(), logp_B.cpu().numpy()
            alive = batch.is_alive_B
            self._check_finite(logp, batch, request_id_B, position)
            record.add(batch.request_B[alive], tokens[alive], logp[alive])
            is_stop_B = self._stops(tokens, batch, record, position)
            record.is_stop[batch.request_B[is_stop_B]] = True
            is_done_B = is_stop_B | (limit_B[batch.request_B] <= position + 1)
            if (is_done_B | ~alive).all():
                return record.responses()
            token_B = self._drop(batch, token_B, is_done_B)
            logits_BV = self._step(batch, token_B)
            position += 1

    def _prefill(self, most_tokens: int) -> tuple[Batch, Tensor]:
        """Run the distinct prompts once and spread cache and logits over the rows."""
        prompts = [request.prompt_tokens for request in self._requests]
        cache = kv_cache.make_cache(self._model.config)
        distinct = prompts
        if kv_cache.has_separable_rows(cache):
            distinct = list(dict.fromkeys(prompts))
        token_UP, mask_UP = _left_padded(distinct)
        position_UP = (mask_UP.cumsum(1) - 1).clamp(min=0)
        is_padded = not bool(mask_UP.all())
        logits_V = self._forward(
            cache, token_UP.to(self._device), position_UP, mask_UP if is_padded else None
        )
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        mask_BK = None
        if is_padded:
            mask_BK = torch.ones(len(prompts), token_UP.shape[1] + most_tokens, dtype=torch.bool)
            mask_BK[:, : token_UP.shape[1]] = _left_padded(prompts)[1]
            mask_BK = mask_BK.to(self._device)
        if len(distinct) < len(prompts):
            number = {prompt: row for row, prompt in enumerate(distinct)}
            row_B = torch.tensor([number[prompt] for prompt in prompts], device=self._device)
            cache.batch_select_indices(row_B)
            logits_V = logits_V[row_B]
        batch = Batch(
            request_B=np.arange(len(prompts)),
            is_alive_B=np.ones(len(prompts), dtype=bool),
            cache=cache,
            mask_BK=mask_BK,
            position_B1=(length_B if is_padded else length_B[:1])[:, None].to(self._device),
            num_cached=token_UP.shape[1],
        )
        return batch, logits_V

    def _step(self, batch: Batch, token_B: Tensor) -> Tensor:
        """Feed one token a row and return the logits of the next."""
        batch.num_cached += 1
        mask = batch.mask_BK
        if mask is not None:
            mask = mask[:, : batch.num_cached]
        logits_BV = self._forward(batch.cache, token_B[:, None], batch.position_B1, mask)
        batch.position_B1 = batch.position_B1 + 1
        return logits_BV

    def _forward(
        self, cache: DynamicCache, token_BP: Tensor, position_BP: Tensor, mask_BK: Tensor | None
    ) -> Tensor:
        """Logits [B, V] after the last of the given tokens."""
        arguments: dict[str, Any] = dict(self._logits_kept)
        if "position_ids" in self._engine._signature:
            arguments["position_ids"] = position_BP.to(self._device)
        elif mask_BK is None:
            # Models that count positions from the mask (alibi) want to see one.
            num_keys = cache.get_seq_length() + token_BP.shape[1]
            mask_BK = torch.ones(len(token_BP), num_keys, dtype=torch.bool)
        if mask_BK is not None and token_BP.shape[1] == 1 and self._takes_final_mask(cache):
            arguments["attention_mask"] = self._final_mask(mask_BK)
        elif mask_BK is not None:
            arguments["attention_mask"] = mask_BK.to(self._device, torch.long)
        output = self._model(input_ids=token_BP, past_key_values=cache, use_cache=True, **arguments)
        return output.logits[:, -1]

    def _takes_final_mask(self, cache: DynamicCache) -> bool:
        """Whether one mask serves every layer, so that transformers need not make it."""
        return (
            self._model._supports_attention_backend
            and self._model.config._attn_implementation in ("sdpa", decode_attention.NAME)
            and "position_ids" in self._engine._signature
            and kv_cache.is_plain(cache)
        )

    def _final_mask(self, mask_BK: Tensor) -> Tensor:
        """[B, 1, 1, K]; ours as what is added to the scores: each layer would make that of it."""
        mask_B11K = mask_BK[:, None, None, :]
        if self._model.config._attn_implementation != decode_attention.NAME:
            return mask_B11K
        bias_B11K = torch.zeros(mask_B11K.shape, dtype=self._engine._dtype, device=self._device)
        return bias_B11K.masked_fill_(~mask_B11K, -torch.inf)

    def _uniforms(self, position: int, request_B: np.ndarray) -> Tensor:
        block, column = divmod(position, choice.BLOCK)
        if column == 0:
            self._uniform_BT = choice.uniforms([x.seed for x in self._requests], block)
        return torch.from_numpy(self._uniform_BT[request_B, column]).to(self._device)

    def _check_finite(
        self, logp: np.ndarray, batch: Batch, request_id_B: np.ndarray, position: int
    ) -> None:
        is_bad_B = ~np.isfinite(logp) & batch.is_alive_B
        if is_bad_B.any():
            bad = sorted(request_id_B[batch.request_B[is_bad_B]].tolist())
            raise NotFiniteError(
                f"{self._engine._policy}: logits are not finite at response token {position} of "
                f"request {listed(bad)}; the policy has diverged, go back to an earlier one",
                bad,
            )

    def _stops(
        self, tokens: np.ndarray, batch: Batch, record: "_Record", position: int
    ) -> np.ndarray:
        """Which alive rows ended with the token just sampled."""
        if position < self._params.min_tokens:
            return np.zeros(len(tokens), dtype=bool)
        is_stop_B = np.isin(tokens, self._end_ids) & batch.is_alive_B
        if self._stop is not None and record.tokens is not None:
            for row in np.flatnonzero(batch.is_alive_B & ~is_stop_B):
                is_stop_B[row] = self._stop.completed(record.tokens[batch.request_B[row]])
        return is_stop_B

    def _drop(self, batch: Batch, token_B: Tensor, is_done_B: np.ndarray) -> Tensor:
        """Let finished rows leave the batch, in place; return the tokens of those that stay."""
        if not is_done_B.any():
            return token_B
        if not kv_cache.has_separable_rows(batch.cache):
            batch.is_alive_B &= ~is_done_B
            return token_B
        order = kv_cache.keep_rows(batch.cache, np.flatnonzero(~is_done_B))
        batch.request_B = batch.request_B[order]
        batch.is_alive_B = batch.is_alive_B[order]
        row_B = torch.from_numpy(order).to(self._device)
        if batch.mask_BK is not None:
            batch.mask_BK = batch.mask_BK[row_B]
            batch.position_B1 = batch.position_B1[row_B]
        return token_B[row_B]


class _Record:
    """What was sampled: one entry a step, cut into responses at the end."""

    def __init__(self, num_requests: int, has_stop_strings: bool) -> None:
        self.is_stop = np.zeros(num_requests, dtype=bool)
        self.tokens = [[] for _ in range(num_requests)] if has_stop_strings else None
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, request: np.ndarray, tokens: np.ndarray, logp: np.ndarray) -> None:
        self._steps.append((request, tokens, logp))
        if self.tokens is not None:
            for index, token in zip(request.tolist(), tokens.tolist(), strict=True):
                self.tokens[index].append(token)

    def responses(self) -> list[Response]:
        request, tokens, logp = (
            np.concatenate(column) for column in zip(*self._steps, strict=True)
        )
        by_request = np.argsort(request, kind="stable")
        ends = np.cumsum(np.bincount(request, minlength=len(self.is_stop)))[:-1]
        return [
            Response(t.tolist(), p.tolist(), "stop" if is_stop else "length")
            for t, p, is_stop in zip(
                np.split(tokens[by_request], ends),
                np.split(logp[by_request], ends),
                self.is_stop,
                strict=True,
            )
        ]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(token_UP, mask_UP) of ragged prompts; padding holds token 0 and mask False."""
    width = max(len(prompt) for prompt in prompts)
    token_UP = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_UP = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        token_UP[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_UP[row, width - len(prompt) :] = True
    return token_UP, mask_UP


def _check_causal(policy: Path, signature: set[str]) -> None:
    if "past_key_values" not in signature:
        raise ConfigError(
            f"engine transformers: the model in {policy} keeps no past_key_values; "
            "use a model whose forward takes a key/value cache"
        )
