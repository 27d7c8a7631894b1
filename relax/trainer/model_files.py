"""A Hugging Face model directory as files: which tensor lies where, read by rows."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from relax.errors import ArtifactError
from relax.model_dir import weight_files

# What belongs to a model besides its weights and config.json.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


class ModelFiles:
    """The safetensors files of a directory, opened but not read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._where = {}
        for file, shapes in weight_files(directory).items():
            self._where.update(dict.fromkeys(shapes, safe_open(file, framework="pt")))

    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._where)

    def tensor(self, name: str) -> Tensor:
        """One whole tensor."""
        return self._where[name].get_tensor(name)

    def rows(self, name: str, shape: torch.Size, start: int, count: int) -> Tensor:
        """Rows start .. start + count of a tensor that must have this whole shape."""
        if name not in self._where:
            raise ArtifactError(
                f"model {self.directory}: tensor {name} is missing; the files must name weights "
                "as the model class of config.json does"
            )
        part = self._where[name].get_slice(name)
        if part.get_shape() != list(shape):
            raise ArtifactError(
                f"model {self.directory}: tensor {name} has shape {part.get_shape()}; "
                f"config.json wants {list(shape)}"
            )
        return part[start : start + count]

    def companions(self) -> list[Path]:
        """Tokenizer, chat template and generation files: everything but weights and config."""
        found = {file for pattern in COMPANIONS for file in self.directory.glob(pattern)}
        skipped = {"config.json", "files.json"}
        return sorted(
            file
            for file in found
            if file.name not in skipped and not file.name.endswith(".index.json")
        )
