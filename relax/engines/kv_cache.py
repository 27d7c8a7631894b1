"""A key/value cache for decoding: written in place with room to grow, rows can leave.

Shape letters: B rows of the batch, H key/value heads, K cached positions, D head dimension.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


class GrowingLayer(DynamicLayer):
    """A full-attention cache layer over preallocated buffers.

    transformers' own layer copies everything at each token; this one copies when the buffer is
    full, which then grows by half.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, q, D] states; return all of them, views of the buffers."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            # The prefill's states are kept as they are; the first token makes room.
            self._keys, self._values, self.is_initialized = key_states, value_states, True
            self._num_cached = key_states.shape[-2]
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        start, end = self._num_cached, self._num_cached + key_states.shape[-2]
        if end > self._keys.shape[-2]:
            capacity = end + end // 2 + 64
            self._keys = _enlarged(self._keys[:, :, :start], capacity)
            self._values = _enlarged(self._values[:, :, :start], capacity)
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self._num_cached = end
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Number of cached positions."""
        return self._num_cached if self.is_initialized else 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` (any order, repeats allowed), by copy."""
        end = self._num_cached
        self._keys, self._values = self._keys[indices, :, :end], self._values[indices, :, :end]
        self.keys, self.values = self._keys, self._values

    def keep_rows(self, source_B: Tensor, target_B: Tensor, num_rows: int) -> None:
        """Copy rows `source_B` over rows `target_B`, then forget all but the first `num_rows`."""
        end = self._num_cached
        if len(source_B):
            self._keys[target_B, :, :end] = self._keys[source_B, :, :end]
            self._values[target_B, :, :end] = self._values[source_B, :, :end]
        self._keys, self._values = self._keys[:num_rows], self._values[:num_rows]


def _enlarged(states_BHKD: Tensor, capacity: int) -> Tensor:
    rows, heads, num_cached, dim = states_BHKD.shape
    enlarged = states_BHKD.new_empty((rows, heads, capacity, dim))
    enlarged[:, :, :num_cached] = states_BHKD
    return enlarged


def make_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache that transformers would use for `config`, with its plain layers made growing."""
    cache = DynamicCache(config=config)
    if cache.layers:
        cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    else:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def is_plain(cache: DynamicCache) -> bool:
    """Whether every layer is full attention (known after the prefill)."""
    return all(type(layer) is GrowingLayer for layer in cache.layers)


def has_separable_rows(cache: DynamicCache) -> bool:
    """Whether rows can be repeated and can leave; linear-attention states offer no such thing."""
    return not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def keep_rows(cache: DynamicCache, kept: np.ndarray) -> np.ndarray:
    """Keep rows `kept` (ascending), moving as few as possible; return their order.

    The last kept rows fill the holes among the first: order[i] is the old row now at row i.
    """
    order = np.arange(len(kept))
    holes = np.setdiff1d(order, kept)
    order[holes] = kept[len(kept) - len(holes) :]
    source_B, target_B = torch.from_numpy(order[holes]), torch.from_numpy(holes)
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)  # has_separable_rows
        if isinstance(layer, GrowingLayer):
            device = layer.device
            layer.keep_rows(source_B.to(device), target_B.to(device), len(kept))
        else:
            layer.batch_select_indices(torch.from_numpy(order).to(layer.device))
    return order
