"""From a command line to a run: read, agreed on by all ranks and checked, before vLLM or a model is touched."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colo.config import TINY, Config, check_config
from colo.policy.tiny import make_tiny_model
from colo.ranks import Ranks, join_engine_group, start_ranks
from colo.recipe import config_hash, load_config
from colo.rl.prompts import load_prompts
from colo.rl.rewards import Rewards
from colo.rng import seed_generators
from colo.types import Prompt

REFUSED = 2
"""Exit status of a run whose recipe or input is refused."""
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
    eval_prompts: list[Prompt]
    rewards: Rewards


def start(arguments: Sequence[str], *, needs_eval_prompts: bool = False) -> Run:
    """Join the process group, agree on the recipe and check its input. Collective.

    Input that is refused ends every rank with exit status 2, after one message from rank 0.
    """
    ranks = start_ranks()
    logging.basicConfig(
        level=logging.INFO if ranks.is_main else logging.WARNING,
        format="[%(levelname)s] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return or_refused(lambda: _checked(arguments, ranks, needs_eval_prompts), ranks)


def or_refused(check: Callable[[], T], ranks: Ranks) -> T:
    """What `check` returns; where it raises a ValueError on every rank, one message and exit status 2. Collective."""
    try:
        return check()
    except ValueError as error:
        message = f"refused: {error}\n"
        ranks.from_main(lambda: sys.stderr.write(message), "refusing the recipe")
        sys.exit(REFUSED)


def _checked(arguments: Sequence[str], ranks: Ranks, needs_eval_prompts: bool) -> Run:
    """The run, or a ValueError on every rank."""
    config: Config = ranks.agreed(lambda: load_config(list(arguments)), "reading the recipe")[ranks.rank]
    hashes = ranks.gather(config_hash(config), "comparing the recipe")
    differ = [str(rank) for rank, other in enumerate(hashes) if other != hashes[0]]
    if differ:
        raise ValueError(
            f"the recipe must be the same on every rank, got another than rank 0's on rank {', '.join(differ)}"
        )
    check_config(config, ranks.world_size)
    if needs_eval_prompts and not config.eval_prompts:
        raise ValueError(f"eval_prompts must be a JSONL file or a function's dotted path, got {config.eval_prompts!r}")
    join_engine_group(ranks, config.engine.tensor_parallel_size, config.ranks.timeout_s)
    ranks.notice_s = config.ranks.notice_s
    seed_generators(config.seed, ranks.rank)
    folder = ranks.from_main(lambda: model_folder(config), "finding the model")

    def read() -> Run:
        check_length(config, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
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
            eval_prompts=held_out.prompts if held_out else [],
            rewards=rewards,
        )

    found: list[Run] = []
    ranks.agreed(lambda: found.append(read()), "reading the prompts")
    return found[0]


def model_folder(config: Config) -> Path:
    """The folder of `model`; a tiny model is made in run_dir first, where it is missing."""
    if not config.model.startswith(TINY):
        return Path(config.model)
    folder = Path(config.run_dir) / "model"
    if not (folder / "config.json").is_file():
        make_tiny_model(config.model.removeprefix(TINY), folder, seed=config.seed)
    return folder


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
