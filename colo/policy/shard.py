"""Build a model on meta, shard it over all ranks, and fill each shard from its folder by slices."""

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from colo.policy.folder import TensorFiles, model_files, shard_rows
from colo.policy.names import Piece, checkpoint_pieces, stored_tensors
from colo.policy.scorer import Scorer
from colo.ranks import Ranks
from colo.types import TensorShard

logger = logging.getLogger(__name__)


def read_model_config(folder: Path) -> PretrainedConfig:
    """A folder's config.json, as transformers reads it.

    Raises:
        ValueError: transformers does not know the model, or refuses a value.
    """
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(
            f"model must be a folder whose config.json transformers reads, got {str(folder)!r}: {error}"
        ) from error


def check_trainable(folder: Path) -> None:
    """Refuse a model that `sharded_model` would refuse, reading its config.json and its files' headers alone.

    Raises:
        ValueError: as there, by name.
    """
    model = build_on_meta(folder, torch.float32)
    decoder_layers(Scorer(model, chunk_tokens=1).hf)
    _check_folder(model, checkpoint_pieces(model), model_files(folder))


def build_on_meta(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model of a folder without data, with every dropout off, in eval mode.

    Raises:
        ValueError: transformers has no causal language model of that kind, or cannot read its config.json.
    """
    config = read_model_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model must be a causal language model, got {config.model_type} in {str(folder)!r}")
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def shard(scorer: Scorer, ranks: Ranks, *, dtype: torch.dtype, compute_dtype: torch.dtype) -> Any:
    """Shard a model on meta over all ranks, layer by layer, and give it storage without values. Collective.

    Gradients are summed over ranks, not averaged: the loss divides by one number for all of them.

    Returns:
        The same module, now an FSDPModule too.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    cast = compute_dtype if compute_dtype != dtype else None
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32)
    for layer in decoder_layers(scorer.hf):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no PREMUL_SUM, which a divide factor alone asks for.
            module.set_force_sum_reduction_for_comms(True)
    scorer.to_empty(device=ranks.device)
    scorer.hf.tie_weights()  # to_empty makes a tensor of its own for each name
    return scorer


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that are sharded, and recomputed, one by one: those that transformers never splits over devices."""
    names = set(model._no_split_modules or ())
    # fully_shard gives a module a class of its own, derived from transformers'.
    layers = [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]
    if not layers:
        raise ValueError(f"model must name its layers' class in _no_split_modules, got {model.config.model_type}")
    return layers


def stand_ins(folder: Path, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """What `Policy.weights` will hand out, as whole tensors on meta: names, shapes and dtypes, in its order.

    Args:
        folder: In the Hugging Face layout; of it config.json alone is read.
        dtype: policy.dtype. Parameters have it, and persistent buffers theirs.
    """
    model = build_on_meta(folder, dtype)
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors(model).items()}
    return [
        (piece.name, torch.empty(piece.shape, dtype=dtypes[piece.parameter], device="meta"))
        for piece in checkpoint_pieces(model)
    ]


def load_weights(model: PreTrainedModel, pieces: list[Piece], folder: Path, ranks: Ranks) -> None:
    """Fill this rank's shards, and whole buffers, from a folder, and compute the buffers that no folder holds.

    Args:
        model: Sharded, with storage.
        pieces: Its `checkpoint_pieces`.
        folder: In the Hugging Face layout.
        ranks: Who reads which rows.

    Raises:
        ValueError: the folder lacks a tensor or has it in another shape, or unties a head that the config ties.
    """
    files = model_files(folder)
    _check_folder(model, pieces, files)
    unused = files.names - {piece.name for piece in pieces} - set(model.all_tied_weights_keys)
    if unused and ranks.is_main:
        logger.warning("%d tensors of %s have no place in the model, such as %s", len(unused), folder, min(unused))
    tensors = stored_tensors(model)
    with torch.no_grad():
        for piece in pieces:
            _fill(local_rows(tensors[piece.parameter], ranks), piece, files)
        for other, name in model.all_tied_weights_keys.items():
            rows = local_rows(tensors[name], ranks)[1]
            if other in files and not torch.equal(files.read(other, rows), files.read(name, rows)):
                raise ValueError(f"model must have {other} equal to {name}, which its config ties, got {str(folder)!r}")
    _fill_other_buffers(model, tensors)


def local_rows(tensor: Tensor, ranks: Ranks) -> tuple[Tensor, tuple[int, int]]:
    """This rank's part of a tensor, and which rows [start, end) of the whole it is."""
    if not isinstance(tensor, DTensor):
        return tensor, (0, tensor.shape[0] if tensor.dim() else 1)
    assert tensor.placements == (Shard(0),), f"FSDP2 must shard rows, got {tensor.placements}"
    local, rows = tensor.to_local(), shard_rows(tensor.shape[0], ranks.rank, ranks.world_size)
    assert local.shape[0] == rows[1] - rows[0], f"rank {ranks.rank} must keep rows {rows}, got {local.shape[0]}"
    return local, rows


def _fill(part: tuple[Tensor, tuple[int, int]], piece: Piece, files: TensorFiles) -> None:
    local, rows = part
    if not piece.box:  # a buffer that is one number
        local.copy_(files.read(piece.name))
        return
    start, length = piece.box[0]
    low, high = piece.rows_within(rows)
    if low == high:
        return
    target = piece.part_of(local, rows)
    # A box one row high may have lost that dimension in the folder, so it is read whole.
    source = files.read(piece.name, None if length == 1 else (low - start, high - start))
    target.copy_(source.view(target.shape))


def _check_folder(model: PreTrainedModel, pieces: list[Piece], files: TensorFiles) -> None:
    kind = f"{model.config.model_type} in {str(files.folder)!r}"
    for piece in pieces:
        if piece.name not in files:
            raise ValueError(f"model must have the tensor {piece.name} {list(piece.shape)}, got {kind} without it")
        if files.shape(piece.name) != piece.shape:
            raise ValueError(
                f"model must have {piece.name} of shape {list(piece.shape)}, "
                f"got {kind} with {list(files.shape(piece.name))}"
            )


def _fill_other_buffers(model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    # transformers computes them where it initializes weights, which skips whatever is marked as loaded.
    for tensor in stored.values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()


def sharded_model(
    folder: Path, ranks: Ranks, *, dtype: torch.dtype, compute_dtype: torch.dtype, chunk_tokens: int
) -> tuple[Any, list[Piece]]:
    """A folder's model, sharded and loaded, and how its tensors are named in folders. Collective.

    Raises:
        ValueError: as `checkpoint_pieces` and `load_weights`, on every rank.
    """
    model = build_on_meta(folder, dtype)
    pieces = checkpoint_pieces(model)
    scorer = shard(Scorer(model, chunk_tokens=chunk_tokens).eval(), ranks, dtype=dtype, compute_dtype=compute_dtype)
    ranks.agreed(lambda: load_weights(model, pieces, folder, ranks), "loading the model")
    return scorer, pieces


class LocalShards:
    """This rank's parts of a sharded model's tensors, under their names in folders, as views of what is trained.

    They are made once, and anew where a tensor's storage is another: to cut thousands of experts out of their
    parameters takes longer than the reload that reads them.
    """

    def __init__(self, scorer: Any, pieces: list[Piece], ranks: Ranks) -> None:
        """Take a model as `shard` returns it, and its `checkpoint_pieces`."""
        self._ranks = ranks
        self._sharded = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.parameter, []).append(piece)
        names = {parameter: parameter.rpartition(".") for parameter in self._pieces}
        self._owners = {parameter: (scorer.hf.get_submodule(name[0]), name[2]) for parameter, name in names.items()}
        self._places: dict[str, tuple[Any, ...]] = {}
        self._shards: dict[str, list[tuple[str, TensorShard]]] = {}

    def reshard(self) -> None:
        """Let modules hold their sharded parameters: a forward without gradients leaves the root's whole, elsewhere."""
        for module in self._sharded:
            module.reshard()

    @torch.no_grad()
    def now(self) -> list[tuple[str, TensorShard]]:
        """(name, part) in the order of the pieces; the same objects as before where no storage is another."""
        self.reshard()
        for parameter, pieces in self._pieces.items():
            module, attribute = self._owners[parameter]
            local, rows = local_rows(getattr(module, attribute), self._ranks)
            place = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local.dtype)
            if self._places.get(parameter) != place:  # the views keep their storage alive, so no other gets its place
                self._places[parameter] = place
                self._shards[parameter] = [(piece.name, piece.shard_of(local.detach(), rows)) for piece in pieces]
        return [item for parameter in self._pieces for item in self._shards[parameter]]
