"""The step and the loop: `torchrun ... -m colo.train --config-name RECIPE [overrides]`."""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from colo.checkpoint import (
    TRAINER,
    Trained,
    delete_later,
    find_checkpoint,
    load_checkpoint,
    load_sampled,
    remove_leftovers,
    save_checkpoint,
)
from colo.config import Config
from colo.engine.engine import Engine
from colo.evaluate import Evaluator
from colo.metrics import open_metrics_log, read_metrics
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks, stop_ranks
from colo.resume import save_options
from colo.rl.batch import batch_size, make_batch
from colo.rl.sampler import Sampler
from colo.start import or_refused, start
from colo.stop import StopRequest

logger = logging.getLogger(__name__)


@record  # torchrun reports the traceback of the rank that failed
def train(arguments: list[str]) -> None:
    """Train a policy on one GPU per process, which it shares, in turns, with its vLLM engine. Collective."""
    run = start(arguments)
    config, ranks, run_dir = run.config, run.ranks, Path(run.config.run_dir)
    stop = StopRequest(ranks)
    ranks.from_main(lambda: remove_leftovers(run_dir), "removing what a killed save left")
    checkpoint = or_refused(
        lambda: ranks.from_main(lambda: checkpoint_to_resume(config), "finding a checkpoint"), ranks
    )
    tensors = stand_ins(run.model_folder, getattr(torch, config.policy.dtype))
    engine = Engine(config, ranks, run.model_folder, tensors, run.baseline)
    or_refused(engine.require_reloadable, ranks)
    policy = or_refused(lambda: Policy(config, ranks, run.model_folder), ranks)
    engine.account_for(policy.held_bytes)
    sampler = Sampler(config, ranks, run.prompts, run.rewards, run.tokenizer)
    evaluator = Evaluator(run)
    first_step, means = or_refused(lambda: take_up(checkpoint, config, policy, ranks), ranks)
    sampler.load_state(load_sampled(checkpoint))
    log = open_metrics_log(config, first_step, ranks, means)
    ranks.from_main(lambda: save_options(config, run.prompts_digest), "writing config.yaml")
    step_aside = policy.step_aside if config.policy.offload == "all" else None

    for step in range(first_step, config.num_steps):
        started = time.perf_counter()
        with engine.awake(policy.weights(), version=str(policy.num_updates), step_aside=step_aside):
            # In here the free memory is the engine's,
            scores = evaluator.at(engine, step)
            rollout = sampler.rollout(engine, step)
        batch = make_batch(  # and out here it is the policy's
            rollout.groups,
            config,
            num_updates=policy.num_updates,
            group_rank=ranks.group_rank,
            group_size=ranks.tensor_parallel_size,
        )
        with engine.aside(*batch_size(batch), lambda: {"gradients": policy.gradient_bytes}):
            update = policy.update(batch)
        metrics = scores | rollout.metrics | update | engine.take_metrics()
        log.log(step, metrics | step_times(metrics, started))
        is_stopped = stop.agreed()
        if is_stopped or is_due(step + 1, config):
            sampled = sampler.state()
            save_checkpoint(config, step + 1, policy, log.state(), ranks, run.model_folder, sampled=sampled)
        if is_stopped:
            logger.info("stopped by SIGTERM after %d steps, saved step-%d", step + 1, step + 1)  # rank 0 alone shows it
            break
    else:
        if evaluator.is_due(config.num_steps):
            with engine.awake(policy.weights(), version=str(policy.num_updates), step_aside=step_aside):
                log.log(config.num_steps, evaluator.at(engine, config.num_steps))
    log.close()
    run.rewards.close()
    stop.finished()
    engine.close()
    stop_ranks()  # on success only: leaving while an error propagates makes the other ranks fail first


def checkpoint_to_resume(config: Config) -> Path | None:
    """The verified checkpoint that `resume` asks for, if any; for rank 0, before anything is built.

    Raises:
        ValueError: as `find_checkpoint`, or more steps are done than the run is to have.
    """
    folder = find_checkpoint(Path(config.run_dir), config.resume)
    read_metrics(Path(config.run_dir) / "metrics.jsonl")  # refuses a damaged one before it is cut back
    if folder is not None:
        done = json.loads((folder / TRAINER).read_text())["step"]
        if done > config.num_steps:
            raise ValueError(f"num_steps must be at least {done}, the steps of {folder}, got {config.num_steps}")
    return folder


def take_up(checkpoint: Path | None, config: Config, policy: Trained, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint, if any, and delete what run_dir has from later steps. Collective.

    Returns:
        The number of steps done, and the metrics' running means.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    first_step, means = load_checkpoint(checkpoint, policy, ranks) if checkpoint else (0, {})
    ranks.from_main(lambda: delete_later(Path(config.run_dir), first_step), "deleting later checkpoints")
    if first_step == config.num_steps:
        logger.info("already complete at step %d", first_step)  # shown by rank 0 alone
    return first_step, means


def is_due(num_done: int, config: Config) -> bool:
    """Whether to save after `num_done` steps: each checkpoint_every-th, before each saved rollout, and at the end."""
    return num_done == config.num_steps or any(
        every > 0 and num_done % every == 0 for every in (config.checkpoint_every, config.rollout.save)
    )


def step_times(metrics: dict[str, float], started: float) -> dict[str, float]:
    """This rank's `time_s/step`, and of it `time_s/switch` and `switch/share`, from the engine's own timings."""
    step_s = time.perf_counter() - started
    switch_s = sum(value for name, value in metrics.items() if name.startswith("switch/"))
    return {"time_s/step": step_s, "time_s/switch": switch_s, "switch/share": switch_s / step_s}


def main() -> None:
    """Entry point of `python -m colo.train`."""
    train(sys.argv[1:])


if __name__ == "__main__":
    main()
