"""Tensors of any number into safetensors files of bounded size, one file's worth in memory at a time."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


class TensorSource:
    """Tensors of the policy, and whether taking one of them raised."""

    def __init__(self, items: Iterable[tuple[str, Tensor]]) -> None:
        self._items = iter(items)
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        self.has_failed = True
        item = next(self._items, None)
        self.has_failed = False
        if item is None:
            raise StopIteration
        return item


def write_tensors(items: Iterable[tuple[str, Tensor]], folder: Path, stem: str, max_file_bytes: int) -> None:
    """One file, or several and their index, as save_pretrained names them; no file where there is no tensor."""
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0
    parts: list[list[str]] = []

    def write_held() -> None:
        parts.append(list(held))
        save_file(held, folder / f"{stem}-{len(parts)}.part", metadata={"format": "pt"})
        held.clear()

    for name, tensor in items:
        if held and held_bytes + tensor.nbytes > max_file_bytes:
            write_held()
            held_bytes = 0
        # A copy: safetensors refuses two names over one storage, which views of packed experts are.
        held[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        held_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    if held:
        write_held()
    index: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        final = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{stem}-{number}.part").rename(folder / final)
        index |= dict.fromkeys(names, final)
    if len(parts) > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": index}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=1))
