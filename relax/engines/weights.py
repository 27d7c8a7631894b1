"""Weights of a published policy into a transformers model: built once, then swapped in place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from relax.engines import decode_attention
from relax.errors import ArtifactError
from relax.model_dir import AGAIN, Shapes


def build(policy: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in `policy`, ready for inference.

    Raises:
        ArtifactError: a weight of the model that the directory does not hold or holds in another
            shape, or a head that differs from the embedding that config.json ties it to.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            policy,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    finally:
        if has_bar:
            logging.enable_progress_bar()
    model, report = loaded
    if wrong := sorted(report["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise ArtifactError(
            f"{policy}: tensor {name} has shape {list(found)}; config.json wants {list(wanted)}; "
            f"{AGAIN}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ArtifactError(
            f"{policy}: {len(missing)} weights of the model are missing, first {missing[0]}; "
            f"{AGAIN}"
        )
    _check_tied(policy, model)
    decode_attention.install(model)
    return model.to(device).eval()


def has_names(model: Any, files: Mapping[Path, Shapes]) -> bool:
    """Whether `files` name tensors as `model` does (some architectures rename while loading)."""
    names = frozenset().union(*files.values())
    return names <= model.state_dict().keys()


def swap(model: Any, files: Mapping[Path, Shapes]) -> None:
    """Copy the tensors of the safetensors `files` (see `has_names`) into `model`, in place.

    A tied head may be published or left out; published, it must equal the embedding it is tied to.

    Raises:
        ArtifactError: a missing tensor, another shape, or a tied pair that differs.
    """
    targets = model.state_dict()
    alias = _tied(targets)
    where = {name: path for path, names in files.items() for name in names}
    directory = next(iter(files)).parent
    published = {alias[name] for name in where}
    if missing := sorted(set(alias.values()) - published):
        raise ArtifactError(f"{directory}: tensor {missing[0]} is missing; publish it explicitly")
    written: set[str] = set()
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in sorted(names):
                owner = alias[name]
                _copy(path, name, file.get_tensor(name), targets[owner], owner in written)
                written.add(owner)


def _check_tied(policy: Path, model: Any) -> None:
    """Transformers unties a published head that differs, with a warning; vLLM does not."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return
    if model._tied_weights_keys and head.weight is not model.get_input_embeddings().weight:
        raise ArtifactError(
            f"{policy}: the head differs from the weight it is tied to; the policy is stale or its "
            "tie_word_embeddings is wrong"
        )


def _copy(path: Path, name: str, source: Tensor, target: Tensor, is_written: bool) -> None:
    if source.shape != target.shape:
        raise ArtifactError(
            f"{path}: {name} has shape {tuple(source.shape)}; the model's is {tuple(target.shape)}"
        )
    if is_written and not torch.equal(source.to(target.device, target.dtype), target):
        raise ArtifactError(
            f"{path}: {name} differs from the weight it is tied to; the policy is stale or its "
            "tie_word_embeddings is wrong"
        )
    with torch.no_grad():
        target.copy_(source)


def _tied(targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name that shares its storage."""
    first: dict[int, str] = {}
    alias: dict[str, str] = {}
    for name, tensor in targets.items():
        alias[name] = first.setdefault(tensor.data_ptr(), name)
    return alias
