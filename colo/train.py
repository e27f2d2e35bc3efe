"""The step and the loop: `torchrun ... -m colo.train --config-name RECIPE [overrides]`."""

import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from colo.checkpoint import find_checkpoint, load_checkpoint, remove_leftovers, save_checkpoint
from colo.config import Config
from colo.engine.engine import Engine
from colo.evaluate import Evaluator
from colo.metrics import open_metrics_log
from colo.policy.model import Policy
from colo.ranks import stop_ranks
from colo.recipe import to_yaml
from colo.rl.batch import make_batch
from colo.rl.sampler import Sampler
from colo.start import or_refused, start
from colo.stop import StopRequest


@record  # torchrun reports the traceback of the rank that failed
def train(arguments: list[str]) -> None:
    """Train a policy on one GPU per process, which it shares, in turns, with its vLLM engine. Collective."""
    run = start(arguments)
    config, ranks, run_dir = run.config, run.ranks, Path(run.config.run_dir)
    stop = StopRequest(ranks)
    ranks.from_main(lambda: remove_leftovers(run_dir), "removing what a killed save left")
    checkpoint = or_refused(
        lambda: ranks.from_main(lambda: find_checkpoint(run_dir, config.resume), "finding a checkpoint"), ranks
    )
    engine = Engine(config, ranks, run.model_folder)
    policy = Policy(config, ranks, run.model_folder)
    sampler = Sampler(config, ranks, run.prompts, run.rewards, run.tokenizer)
    evaluator = Evaluator(run)
    first_step, means = load_checkpoint(checkpoint, policy, ranks) if checkpoint else (0, {})
    log = open_metrics_log(config, first_step, ranks, means)
    ranks.from_main(lambda: (run_dir / "config.yaml").write_text(to_yaml(config)), "writing config.yaml")

    for step in range(first_step, config.num_steps):
        started = time.perf_counter()
        with engine.awake(policy.weights(), version=str(policy.num_updates)):  # in here the free memory is the engine's
            scores = evaluator.at(engine, step)
            rollout = sampler.rollout(engine, step)
        batch = make_batch(  # and out here it is the policy's
            rollout.groups, config, group_rank=ranks.group_rank, group_size=ranks.tensor_parallel_size
        )
        update = policy.update(batch)
        metrics = scores | rollout.metrics | update | engine.take_timings()
        log.log(step, metrics | step_times(metrics, started))
        is_stopped = stop.agreed()
        if is_stopped or is_due(step + 1, config):
            save_checkpoint(config, step + 1, policy, log.state(), ranks, run.model_folder)
        if is_stopped:
            break
    else:
        if evaluator.is_due(config.num_steps):
            with engine.awake(policy.weights(), version=str(policy.num_updates)):
                log.log(config.num_steps, evaluator.at(engine, config.num_steps))
    log.close()
    run.rewards.close()
    stop.finished()
    engine.close()
    stop_ranks()  # on success only: leaving while an error propagates makes the other ranks fail first


def is_due(num_done: int, config: Config) -> bool:
    """Whether to save after `num_done` steps: each checkpoint_every-th, and at the end."""
    every = config.checkpoint_every
    return num_done == config.num_steps or (every > 0 and num_done % every == 0)


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
