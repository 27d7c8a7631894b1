"""A GGUF file as a directory in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path


def convert(source: Path, directory: Path) -> None:
    """Write the model and tokenizer of a GGUF file, de-quantized to float32.

    The directory appears when it is whole. Needs the packages gguf and accelerate.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**known)
    loaded = AutoModelForCausalLM.from_pretrained(**known, dtype=torch.float32)
    # Built anew from the config: the loaded one remembers its quantization and saves as such.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    scratch = directory.with_name(f".{directory.name}")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    scratch.rename(directory)
