"""What `colo replay` launches on each rank: one update on a saved rollout. vLLM is not imported."""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from colo.checkpoint import find_damage, load_checkpoint
from colo.commands.replay import ReplayOptions, read_replay_options
from colo.config import TINY, Config
from colo.policy.model import Policy
from colo.ranks import Ranks, join_engine_group, start_ranks, stop_ranks
from colo.recipe import load_config
from colo.resume import CONFIG, rollout_path
from colo.rl.batch import longest_completion, make_batch, rollout_metrics, rollout_sums
from colo.rl.rollout_files import read_rollout
from colo.rng import seed_generators
from colo.start import or_refused, refuse_more_ranks_than_gpus
from colo.types import Group


@record  # torchrun reports the traceback of the rank that failed
def replay(arguments: Sequence[str]) -> None:
    """Train on the rollout and write the step's metrics as one JSON line to stdout. Collective; under torchrun.

    Nothing in run_dir is changed.
    """
    if torch.cuda.is_available():
        refuse_more_ranks_than_gpus(torch.cuda.device_count())
    ranks = start_ranks()
    logging.basicConfig(level=logging.WARNING, format="[%(levelname)s] %(message)s", stream=sys.stderr)
    options, config, groups = or_refused(lambda: _read(arguments, ranks), ranks)
    policy = or_refused(lambda: _policy_before(options, config, ranks), ranks)
    mine = groups[ranks.replica :: ranks.num_replicas]
    batch = make_batch(
        mine,
        config,
        num_updates=policy.num_updates,
        group_rank=ranks.group_rank,
        group_size=ranks.tensor_parallel_size,
    )
    metrics = _rollout_metrics(mine, ranks) | policy.update(batch)
    if ranks.is_main:
        sys.stdout.write(json.dumps({"step": options.step, **metrics}) + "\n")
        sys.stdout.flush()
    stop_ranks()


def _read(arguments: Sequence[str], ranks: Ranks) -> tuple[ReplayOptions, Config, list[Group]]:
    """The options, the run's recipe, and the rollout of all replicas. Collective."""

    def read() -> tuple[ReplayOptions, Config, list[Group]]:
        options = read_replay_options(list(arguments))
        config = load_config(["--config-name", str(options.run_dir / CONFIG)])
        config = dataclasses.replace(config, run_dir=str(options.run_dir))  # it may have been moved
        size = config.engine.tensor_parallel_size
        if ranks.world_size % size:
            raise ValueError(
                f"--ranks must be a multiple of engine.tensor_parallel_size {size}, got {ranks.world_size}"
            )
        return options, config, read_rollout(rollout_path(options.run_dir, options.step))

    found = ranks.agreed(read, "reading the rollout")[ranks.rank]
    config = found[1]
    join_engine_group(ranks, config.engine.tensor_parallel_size, config.ranks.timeout_s)
    ranks.notice_s = config.ranks.notice_s
    return found


def _policy_before(options: ReplayOptions, config: Config, ranks: Ranks) -> Policy:
    """The policy as it was before the step. Collective.

    Raises:
        ValueError: the checkpoint is damaged, or the model is not there.
    """
    seed_generators(config.seed, ranks.rank)
    folder = ranks.from_main(lambda: _model(config), "finding the model")
    checkpoint = options.run_dir / "checkpoints" / f"step-{options.step}" if options.step else None
    if checkpoint:
        ranks.from_main(lambda: _require_whole(checkpoint), "checking the checkpoint")
    policy = Policy(config, ranks, folder)
    if checkpoint:
        load_checkpoint(checkpoint, policy, ranks)
    return policy


def _model(config: Config) -> Path:
    folder = Path(config.run_dir) / "model" if config.model.startswith(TINY) else Path(config.model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a folder that holds config.json, got {str(folder)!r}")
    return folder


def _require_whole(checkpoint: Path) -> None:
    damage = find_damage(checkpoint)
    if damage:
        raise ValueError(f"--step must be of a checkpoint that matches its manifest, got {str(checkpoint)!r}: {damage}")


def _rollout_metrics(groups: list[Group], ranks: Ranks) -> dict[str, float]:
    """As the run logged them, without what is not in the file: scores by function, and time-outs. Collective."""
    what = "the rollout's metrics"
    counted = groups if ranks.group_rank == 0 else []  # the other ranks of an engine hold the same
    return rollout_metrics(ranks.sum(rollout_sums(counted), what), ranks.max(longest_completion(groups), what))


def main() -> None:
    """Entry point of `python -m colo.commands.replay_step`."""
    replay(sys.argv[1:])


if __name__ == "__main__":
    main()
