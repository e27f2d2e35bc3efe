"""From a command line to a run: read, agreed on by all ranks and checked, before vLLM or a model is touched."""

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colo.config import TINY, Config, check_config
from colo.engine.memory_baseline import Baseline, BaselineWatch
from colo.engine.peers import check_shared_memory
from colo.engine.planned_kv import plannable_shape, read_sizes
from colo.memory_advice import refuse_too_large
from colo.model_shape import ModelShape, model_shape, stored_shapes
from colo.policy.shard import check_trainable, read_model_config, stand_ins
from colo.policy.tiny import make_tiny_model
from colo.ranks import Ranks, join_engine_group, start_ranks
from colo.recipe import config_hash, load_config
from colo.resume import refuse_changed_options, refuse_changed_prompts, refuse_other_tiny_model
from colo.rl.prompts import load_prompts
from colo.rl.rewards import Rewards
from colo.rng import seed_generators
from colo.types import Prompt

REFUSED = 2
"""Exit status of a run whose recipe or input is refused."""
REFUSAL_LIMIT_S = 60.0
"""How long a rank without a GPU waits for the one that says so, after whose end torchrun ends all of them."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What training and evaluation start from."""

    config: Config
    ranks: Ranks
    model_folder: Path
    """`model`, or the tiny model made in run_dir."""
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    prompts_digest: str
    """`rows_digest` of them."""
    eval_prompts: list[Prompt]
    rewards: Rewards
    baseline: Baseline = field(default_factory=Baseline)
    """The memory in use before the engine."""


def start(arguments: Sequence[str], *, is_training: bool = True) -> Run:
    """Join the process group, agree on the recipe and check its input. Collective.

    Input that is refused ends every rank with exit status 2, after one message from rank 0.

    Args:
        arguments: As `load_config` takes them.
        is_training: False for an evaluation: it needs eval_prompts, and does not go on with a run.
    """
    if torch.cuda.is_available():
        refuse_more_ranks_than_gpus(torch.cuda.device_count())
    watch = BaselineWatch()
    ranks = start_ranks()
    baseline = watch.finish(ranks)
    logging.basicConfig(
        level=logging.INFO if ranks.is_main else logging.WARNING,
        format="[%(levelname)s] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return replace(or_refused(lambda: _checked(arguments, ranks, is_training), ranks), baseline=baseline)


def or_refused(check: Callable[[], T], ranks: Ranks) -> T:
    """What `check` returns; where it raises a ValueError on every rank, one message and exit status 2. Collective.

    A subclass of ValueError is no refusal of ours (`Ranks.agreed` says the same): it goes on as it is.
    """
    try:
        return check()
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        message = f"refused: {error}\n"
        ranks.from_main(lambda: sys.stderr.write(message), "refusing the recipe")
        sys.exit(REFUSED)


def refuse_more_ranks_than_gpus(num_gpus: int) -> None:
    """End this host's ranks with one message and exit status 2 where it has more of them than GPUs.

    The first rank without a GPU says it and ends; the others wait until torchrun ends them for it, so that none of
    them ends first. They cannot speak with each other yet: the process group needs a device on each.
    """
    if "LOCAL_RANK" not in os.environ:  # `start_ranks` refuses that
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank < num_gpus:
        return
    if local_rank == num_gpus:
        number = f"at least {num_gpus + 1}"
        if "LOCAL_WORLD_SIZE" in os.environ:
            number = os.environ["LOCAL_WORLD_SIZE"]
        sys.stderr.write(f"refused: ranks per host must be at most its number of GPUs {num_gpus}, got {number}\n")
    else:
        time.sleep(REFUSAL_LIMIT_S)
    sys.exit(REFUSED)


def _checked(arguments: Sequence[str], ranks: Ranks, is_training: bool) -> Run:
    """The run, or a ValueError on every rank."""
    config: Config = ranks.agreed(lambda: load_config(list(arguments)), "reading the recipe")[ranks.rank]
    require_same("the recipe", "another", config_hash(config), ranks)
    ranks.agreed(lambda: check_config(config, ranks.world_size, is_training=is_training), "checking the recipe")
    if not is_training and not config.eval_prompts:
        raise ValueError(f"eval_prompts must be a JSONL file or a function's dotted path, got {config.eval_prompts!r}")
    compare = refuse_changed_options if is_training else refuse_other_tiny_model
    ranks.from_main(lambda: compare(config), "comparing the options with those of the run in run_dir")
    join_engine_group(ranks, config.engine.tensor_parallel_size, config.ranks.timeout_s)
    ranks.notice_s = config.ranks.notice_s
    seed_generators(config.seed, ranks.rank)
    folder = ranks.from_main(lambda: model_folder(config), "finding the model")
    # On rank 0 alone: it takes a while for a large model, and reads the same files.
    ranks.from_main(lambda: check_model(config, folder, is_training), "checking the model")
    if is_training:
        ranks.agreed(lambda: check_transport(config, folder, ranks), "checking the shared memory")
    ranks.from_main(lambda: check_memory(config, folder, ranks, is_training), "planning the memory")

    def read() -> Run:
        tokenizer = read_tokenizer(folder)
        prompts = load_prompts(config.prompts, "prompts", tokenizer, config.rollout)
        held_out = (
            load_prompts(config.eval_prompts, "eval_prompts", tokenizer, config.rollout)
            if config.eval_prompts
            else None
        )
        rewards = Rewards(config.reward_weights, config.scoring)
        rewards.check(prompts.prompts, "prompts")
        if held_out:
            rewards.check(held_out.prompts, "eval_prompts")
        if prompts.num_dropped:
            logger.info("%d prompts longer than rollout.max_prompt_tokens were left out", prompts.num_dropped)
        return Run(
            config=config,
            ranks=ranks,
            model_folder=folder,
            tokenizer=tokenizer,
            prompts=prompts.prompts,
            prompts_digest=rows_digest(prompts.prompts),
            eval_prompts=held_out.prompts if held_out else [],
            rewards=rewards,
        )

    found: list[Run] = []
    ranks.agreed(lambda: found.append(read()), "reading the prompts")
    run = found[0]
    require_same("prompts", "other rows", run.prompts_digest, ranks)
    require_same("eval_prompts", "other rows", rows_digest(run.eval_prompts), ranks)
    if is_training:
        ranks.from_main(
            lambda: refuse_changed_prompts(config, run.prompts_digest), "comparing the prompts with the run's"
        )
    return run


def require_same(what: str, other: str, digest: str, ranks: Ranks) -> None:
    """Refuse what ranks read differently, by a digest of it. Collective.

    Raises:
        ValueError: on every rank; it names those that differ from rank 0.
    """
    digests = ranks.gather(digest, f"comparing {what}")
    differ = [str(rank) for rank, found in enumerate(digests) if found != digests[0]]
    if differ:
        raise ValueError(
            f"{what} must be the same on every rank, got {other} than rank 0's on rank {', '.join(differ)}"
        )


def rows_digest(prompts: list[Prompt]) -> str:
    """Of every row's tokens, text and fields, in order."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()


def model_folder(config: Config) -> Path:
    """The folder of `model`; a tiny model is made in run_dir first, unless it is there, of this family and seed."""
    if not config.model.startswith(TINY):
        return Path(config.model)
    folder = Path(config.run_dir) / "model"
    made_of, wanted = folder / "made_of", f"{config.model} seed={config.seed}\n"
    if not made_of.is_file() or made_of.read_text() != wanted:
        made_of.unlink(missing_ok=True)  # written last: a kill halfway leaves a model that is made again
        make_tiny_model(config.model.removeprefix(TINY), folder, seed=config.seed)
        made_of.write_text(wanted)
    return folder


def check_model(config: Config, folder: Path, is_training: bool) -> None:
    """Refuse a model by its config.json and its files' headers, before vLLM reads them.

    Raises:
        ValueError: transformers does not know it, its positions are too few, or colo cannot train it.
    """
    read_model_config(folder)
    check_length(config, folder)
    if is_training:
        check_trainable(folder)


def check_transport(config: Config, folder: Path, ranks: Ranks) -> None:
    """On a host's first rank, refuse ranks on CPU that cannot read each other's shards: they lie in shared memory.

    Raises:
        ValueError: the host has too little of it for `reload.transport`.
    """
    is_alone = ranks.world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == "1"
    if ranks.device.type == "cpu" and not ranks.local_rank and not is_alone and config.reload.transport != "gather":
        check_shared_memory(shard_bytes(config, folder), config.reload.transport)


def check_memory(config: Config, folder: Path, ranks: Ranks, is_training: bool) -> None:
    """Refuse a model that the KV cache cannot be planned for, and on cards an update that is far too large.

    Raises:
        ValueError: as `plannable_shape` and `refuse_too_large`.
    """
    on_cpu = ranks.device.type == "cpu"
    shape = plannable_shape(config, lambda: read_shape(config, folder, is_training=is_training), on_cpu=on_cpu)
    if shape is not None and is_training and not on_cpu:
        refuse_too_large(config, shape, ranks.world_size, torch.cuda.mem_get_info()[1])


def read_shape(config: Config, folder: Path, *, is_training: bool = True) -> ModelShape:
    """The shape of a folder's model: of its config.json alone, or in an evaluation of its files' headers too.

    Raises:
        ValueError: transformers does not know the model, or (UnknownSizeError) its config lacks a size.
    """
    if not is_training:
        return model_shape(stored_shapes(folder, "model*.safetensors"), read_sizes(folder))
    tensors = stand_ins(folder, getattr(torch, config.policy.dtype))
    return model_shape(((name, tuple(tensor.shape)) for name, tensor in tensors), read_sizes(folder))


def shard_bytes(config: Config, folder: Path) -> int:
    """What the shards of all ranks of a host take together at most, where no other host has any: the whole model."""
    return sum(tensor.nbytes for _, tensor in stand_ins(folder, getattr(torch, config.policy.dtype)))


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: its files are missing or broken.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(
            f"model must be a folder whose tokenizer transformers reads, got {str(folder)!r}: {error}"
        ) from error


def check_length(config: Config, folder: Path) -> None:
    """Refuse sequences longer than the model's positions."""
    shape = json.loads((folder / "config.json").read_text())
    limit = shape.get("text_config", shape).get("max_position_embeddings")
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if limit is not None and needed > limit:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens must be at most {limit}, "
            f"the max_position_embeddings of {config.model}, got {needed}"
        )
    longest = config.engine.vllm.get("max_model_len")
    if limit is not None and longest is not None and int(longest) > limit:
        raise ValueError(
            f"engine.vllm.max_model_len must be at most {limit}, "
            f"the max_position_embeddings of {config.model}, got {longest}"
        )
