"""safetensors files read by slices: what a rank does not keep, it does not read."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of several safetensors files, by name. Files are opened when first read."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        """Take the map of tensor name to file name; `model_files` and `optimizer_files` make it."""
        self.folder = folder
        self._files = files
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        """True if a file holds a tensor of this name."""
        return name in self._files

    @property
    def names(self) -> set[str]:
        """Of every tensor."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, read from its file's header."""
        return tuple(self._reader(name).get_slice(name).get_shape())

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, on the CPU in the file's dtype; with rows (start, end) only those of its first dimension."""
        reader = self._reader(name)
        return reader.get_tensor(name) if rows is None else reader.get_slice(name)[rows[0] : rows[1]]

    def _reader(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt")
        return self._open[file]


def model_files(folder: Path) -> TensorFiles:
    """The weights of a folder in the Hugging Face layout: one file, or several with an index.

    Raises:
        ValueError: it has no weights in safetensors, or lacks a file that its index names.
    """
    index = folder / INDEX
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        lacking = sorted(file for file in set(files.values()) if not (folder / file).is_file())
        if lacking:
            raise ValueError(f"model must have every file that {INDEX} names, got {str(folder)!r} without {lacking[0]}")
        return TensorFiles(folder, files)
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"model must have model.safetensors or {INDEX}, got {str(folder)!r}")
    return _from_headers(folder, [folder / "model.safetensors"])


def optimizer_files(folder: Path) -> TensorFiles:
    """The optimizer's tensors of a checkpoint: every optimizer*.safetensors in it."""
    return _from_headers(folder, sorted(folder.glob("optimizer*.safetensors")))


def _from_headers(folder: Path, paths: list[Path]) -> TensorFiles:
    files = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as reader:
            files |= dict.fromkeys(reader.keys(), path.name)
    return TensorFiles(folder, files)


def shard_rows(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows [start, end) of a tensor's first dimension that FSDP2 keeps on a rank: torch.chunk's, maybe none."""
    chunk = -(-num_rows // world_size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)
