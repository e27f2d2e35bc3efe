"""What a model's shape says about memory: how many parameters where, KV cache and stored activations a token."""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colo.config import WITHOUT_DRAFT_FOLDER

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to one (vllm/model_executor/layers/vocab_parallel_embedding.py)."""
FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FED_NORMS = 2
"""Norms of a layer whose output is a linear layer's input, and so stored: before the attention, before the MLP."""


class UnknownSizeError(ValueError):
    """A config.json lacks a size that a plan is made of."""


@dataclass(frozen=True)
class Stored:
    """Numbers that autograd stores for the backward pass, per token."""

    float32: int = 0
    compute: int = 0
    """In policy.compute_dtype."""

    def __add__(self, other: "Stored") -> "Stored":
        return Stored(self.float32 + other.float32, self.compute + other.compute)

    def bytes(self, compute_bytes: int) -> int:
        """Per token."""
        return FLOAT32 * self.float32 + compute_bytes * self.compute


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model, of tensors by their names in its folder and of its config.json."""

    num_parameters: int
    """Tied ones once."""
    whole_parameters: int
    """Of them, those that every tensor-parallel rank holds whole: vectors (norms, biases)."""
    kv_parameters: int
    """Of them, the projections to keys and values, of which a rank holds one head at least."""
    root_parameters: int
    """Of them, those outside of the layers: embeddings, head, last norm. FSDP2 holds them whole during an update."""
    block_parameters: int
    """Of the largest layer."""
    num_embeddings: int
    """Tables as large as the vocabulary: 1 where the head is tied."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_layers: int
    """With keys and values of every token; those with a sliding window are counted in full."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_latent: int
    """Where keys and values are compressed (MLA): numbers a token and layer, on each rank; else 0."""
    mlp_width: int
    """Numbers a token between the MLP's matrices; experts that a token goes to together."""
    stored: Stored
    """Of all layers."""
    stored_of_layer: Stored
    """Of the largest."""

    def splits_into(self, tensor_parallel_size: int) -> bool:
        """Whether vLLM deals its heads over so many ranks."""
        size, kv_heads = tensor_parallel_size, self.num_kv_heads
        return self.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    def engine_parameters(self, tensor_parallel_size: int) -> int:
        """Of one rank's engine: matrices are cut, vectors are not, the vocabulary is padded."""
        size, heads = tensor_parallel_size, max(1, self.num_kv_heads)
        cut = self.num_parameters - self.whole_parameters - self.kv_parameters
        padding = -self.vocab_size % VOCABULARY_MULTIPLE * self.hidden_size * self.num_embeddings
        kv = math.ceil(self.kv_parameters / min(size, heads))
        return math.ceil((cut + padding) / size) + kv + self.whole_parameters

    def kv_bytes_per_token(self, tensor_parallel_size: int, kv_bytes: int) -> int:
        """Of one rank: 2 x layers x kv_heads / TP (at least 1) x head_dim x bytes."""
        if self.kv_latent:
            return self.num_kv_layers * self.kv_latent * kv_bytes
        heads = max(1, math.ceil(self.num_kv_heads / tensor_parallel_size))
        return 2 * self.num_kv_layers * heads * self.head_dim * kv_bytes


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What a draft of `engine.speculative` adds to the engine, over all tensor-parallel ranks."""

    weight_bytes: int = 0
    kv_numbers: int = 0
    """Keys and values of a token."""


def model_shape(tensors: Iterable[tuple[str, tuple[int, ...]]], config: dict[str, Any]) -> ModelShape:
    """Read a shape.

    Args:
        tensors: Checkpoint names and whole shapes of what is trained; a tied head once.
        config: The folder's config.json; under the usual names where `colo.engine.planned_kv.read_sizes` read it.

    Raises:
        UnknownSizeError: it lacks a size that is needed.
    """
    text = config.get("text_config", config)
    hidden, num_heads = _size(text, "hidden_size", "n_embd"), _size(text, "num_attention_heads", "n_head")
    head_dim = text.get("head_dim") or hidden // num_heads
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    vocab_size = _size(text, "vocab_size")
    root: dict[str, tuple[int, ...]] = {}
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensors:
        (layers.setdefault(layer, {}) if (layer := _layer_of(name)) else root)[name] = shape
    everything = root | {name: shape for layer in layers.values() for name, shape in layer.items()}
    sizes = {name: math.prod(shape) for name, shape in everything.items()}
    attention = (num_heads * head_dim, num_kv_heads * head_dim, num_heads)
    widths = {layer: _mlp_width(text, held) for layer, held in layers.items()}
    stored = {layer: _stored(text, hidden, held, attention, widths[layer]) for layer, held in layers.items()}
    latent = text.get("kv_lora_rank") or 0
    return ModelShape(
        num_parameters=sum(sizes.values()),
        whole_parameters=sum(size for name, size in sizes.items() if len(everything[name]) < 2),
        kv_parameters=sum(
            size
            for name, size in sizes.items()
            if len(everything[name]) == 2 and (".k_proj." in name or ".v_proj." in name)
        ),
        root_parameters=sum(sizes[name] for name in root),
        block_parameters=max((sum(sizes[name] for name in held) for held in layers.values()), default=0),
        num_embeddings=sum(shape == (vocab_size, hidden) for shape in root.values()),
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=len(layers),
        num_kv_layers=_num_kv_layers(text, len(layers)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_latent=latent + (text.get("qk_rope_head_dim") or 0) if latent else 0,
        mlp_width=max(widths.values(), default=0),
        stored=sum(stored.values(), Stored()),
        stored_of_layer=max(stored.values(), key=lambda one: one.bytes(2), default=Stored()),
    )


def draft_shape(speculative: dict[str, Any]) -> DraftShape | None:
    """The shape of the draft that `engine.speculative` names; None where no folder is a draft's (ngram, mtp, suffix).

    Raises:
        ValueError: its files are damaged, or (UnknownSizeError) its config.json lacks a size.
    """
    model = speculative.get("model")
    if not model or speculative.get("method") in WITHOUT_DRAFT_FOLDER:
        return None
    try:
        return read_draft(Path(model))
    except (json.JSONDecodeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(
            f"engine.speculative.model must be a folder whose config.json and safetensors headers can be read, "
            f"got {model!r}: {error}"
        ) from error


def read_draft(folder: Path) -> DraftShape:
    """A draft's shape, of its config.json and the headers of its safetensors files."""
    config = json.loads((folder / "config.json").read_text())
    text, option = config.get("text_config", config), "engine.speculative.model"
    hidden = _size(text, "hidden_size", option=option)
    num_heads = _size(text, "num_attention_heads", option=option)
    head_dim = text.get("head_dim") or hidden // num_heads
    kv_heads = text.get("num_key_value_heads") or num_heads
    offsets = (tensor["data_offsets"] for tensor in _headers(folder, "*.safetensors").values())
    num_bytes = sum(end - start for start, end in offsets)
    kv_numbers = 2 * _size(text, "num_hidden_layers", option=option) * kv_heads * head_dim
    return DraftShape(weight_bytes=num_bytes, kv_numbers=kv_numbers)


def stored_shapes(folder: Path, pattern: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of the tensors in a folder's safetensors files."""
    return [(name, tuple(tensor["shape"])) for name, tensor in _headers(folder, pattern).items()]


def _headers(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            found |= json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    found.pop("__metadata__", None)
    return found


def _size(text: dict[str, Any], *names: str, option: str = "model") -> int:
    for name in names:
        if type(text.get(name)) is int:
            return text[name]
    raise UnknownSizeError(
        f"{option} must say {names[0]} in its config.json for its memory to be planned "
        f"(engine.vllm.kv_cache_memory_bytes needs no plan), got {text.get('model_type')!r} without it"
    )


def _layer_of(name: str) -> str:
    """The prefix up to a layer's number, such as `model.layers.3`; "" outside of the layers."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _num_kv_layers(text: dict[str, Any], num_layers: int) -> int:
    kinds = text.get("layer_types") or []
    return sum("attention" in kind and "linear" not in kind for kind in kinds) if kinds else num_layers


def _mlp_width(text: dict[str, Any], held: dict[str, Any]) -> int:
    if any(".experts." in name for name in held):
        num_experts = text.get("num_experts_per_tok") or text.get("moe_k") or 1
        of_expert = text.get("moe_intermediate_size") or _size(text, "intermediate_size")
        return num_experts * of_expert + (text.get("shared_expert_intermediate_size") or 0)
    if isinstance(text.get("intermediate_size"), int):
        return text["intermediate_size"]
    return text.get("n_inner") or 4 * _size(text, "hidden_size", "n_embd")


def _stored(
    text: dict[str, Any],
    hidden: int,
    held: dict[str, tuple[int, ...]],
    attention: tuple[int, int, int],
    mlp_width: int,
) -> Stored:
    """What transformers' layer stores of a token for its backward pass.

    Counted by torch.autograd.graph.saved_tensors_hooks over transformers 5's layers with SDPA; a test holds it:
    - a norm (of q and k by head too): its input upcast to float32, and the normalized one (Gemma keeps that in
      float32); its output where a linear layer or the attention reads it,
    - attention: q, k, v, the output, and the float32 logsumexp by head (a fused kernel: no [T, T] matrix; float32
      compute with fewer kv_heads than heads has none on CUDA, and takes more),
    - a gated MLP: gate, its activation, up, their product (without a gate: two); experts also the token and what
      comes out, once for each expert that it goes to.
    """
    q, kv, num_heads = attention
    is_gemma = str(text.get("model_type", "")).startswith("gemma")
    normed = 0
    for name, shape in held.items():
        if len(shape) == 1 and "norm" in name and name.endswith("weight"):
            by_head = {"q_norm": q, "k_norm": kv}
            normed += next((size for part, size in by_head.items() if part in name), shape[0])
    float32 = normed * (2 if is_gemma else 1) + num_heads
    is_gated = any("gate" in name or ".w3." in name for name in held)
    compute = (0 if is_gemma else normed) + FED_NORMS * hidden + 2 * (q + kv) + (4 if is_gated else 2) * mlp_width
    if any(".experts." in name for name in held):
        num_experts = text.get("num_experts_per_tok") or 1
        compute += num_experts * 2 * hidden
    return Stored(float32=float32, compute=compute)
