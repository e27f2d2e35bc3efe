"""colo check run: may a run with this recipe be trusted? The loop itself, once without learning and once with."""

import dataclasses
import hashlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from colo.config import Config
from colo.engine.engine import Engine
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks, stop_ranks
from colo.rl.batch import make_batch
from colo.rl.sampler import GREEDY_SEED, Sampler
from colo.start import Run, or_refused, start
from colo.types import Request, Sampling

NUM_PROBES = 4
"""Prompts that are completed greedily at each step."""
MAX_GROWTH = 1.5
"""The gap's mean over the second half of the steps, as a multiple of that over the first, that still counts as flat."""
MAX_JUMP = 2.0
"""The gap after a step of learning, as a multiple of the mean before it, that still counts as alike."""
ROUNDING = 1e-6
"""Nats; below it a gap is rounding, and its growth says nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    is_ok: bool
    seen: str


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one step showed."""

    policy: str
    """A digest of the policy's weights over all ranks, before the step's update."""
    engine: str
    """A digest of the engines' weights over all ranks, as proven after the reload."""
    tokens: list[list[int]]
    """Greedy completions of the probes."""
    num_cached: int
    """Cached prompt tokens of the first request after the reload."""
    gap: float
    """Mean absolute gap, in nats."""


def check(run: Run, num_steps: int, make_policy: Callable[[Config, Ranks], Policy]) -> list[Row]:
    """Run `num_steps` steps with learning rate 0, one that learns, and one more. Collective.

    Returns:
        The table's rows; after one that failed because a step raised there are no others.
    """
    config, ranks = run.config, run.ranks
    constant = dataclasses.replace(config.update, schedule="constant", warmup_steps=0)
    learning = dataclasses.replace(config, update=constant)
    still = dataclasses.replace(config, update=dataclasses.replace(constant, lr=0.0))
    dtype = getattr(torch, config.policy.dtype)
    engine = Engine(config, ranks, run.model_folder, stand_ins(run.model_folder, dtype))
    or_refused(engine.require_reloadable, ranks)
    policy = make_policy(still, ranks)
    sampler = Sampler(config, ranks, run.prompts, run.rewards, run.tokenizer)
    sights: list[Sight] = []
    for step in range(num_steps + 2):
        policy.config = learning if step == num_steps else still
        try:
            sights.append(_step(run, engine, policy, sampler, step))
        except RuntimeError as error:
            return [*judge(sights, num_steps), Row(name=f"step {step}", is_ok=False, seen=str(error))]
    engine.close()
    return judge(sights, num_steps)


def _step(run: Run, engine: Engine, policy: Policy, sampler: Sampler, step: int) -> Sight:
    ranks = run.ranks
    mine = hashlib.sha256()
    for _, shard in policy.weights():
        mine.update(shard.local.detach().float().cpu().contiguous().numpy().tobytes())
    probes = [
        Request(slot=slot, sample=0, prompt_token_ids=prompt.token_ids, seed=GREEDY_SEED, max_new_tokens=16)
        for slot, prompt in enumerate(run.prompts[:NUM_PROBES])
    ]
    with engine.awake(policy.weights(), version=str(policy.num_updates)):
        proven = engine.prove()
        completions = engine.generate(probes, Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=()), "probing")
        rollout = sampler.rollout(engine, step)
    batch = make_batch(
        rollout.groups,
        run.config,
        group_rank=ranks.group_rank,
        group_size=ranks.tensor_parallel_size,
        num_updates=policy.num_updates,
    )
    metrics = policy.update(batch)
    return Sight(
        policy="".join(ranks.gather(mine.hexdigest(), "comparing weights")),
        engine="".join(ranks.gather(proven, "comparing weights")),
        tokens=[completion.token_ids for completion in completions],
        num_cached=completions[0].num_cached_tokens,
        gap=metrics["gap/mean_abs"],
    )


def judge(sights: list[Sight], num_steps: int) -> list[Row]:
    """The rows for what was seen: `num_steps` steps that did not learn, then perhaps one that did and one more."""
    still, after = sights[: num_steps + 1], sights[num_steps + 1 :]  # the step that learns began with the same weights
    rows = []
    if len(still) > 1:
        rows = [
            _same("policy weights, learning rate 0", [sight.policy for sight in still]),
            _same("engine weights, as proven", [sight.engine for sight in still]),
            _same("greedy tokens", [str(sight.tokens) for sight in still]),
            _flat([sight.gap for sight in still]),
        ]
    if sights:
        cached = [sight.num_cached for sight in sights]
        seen = f"{max(cached)} in the first request after each reload"
        rows.append(Row(name="cached tokens", is_ok=max(cached) == 0, seen=seen))
    if after:
        is_moved = after[0].policy != still[-1].policy and after[0].engine != still[-1].engine
        seen = "policy and engine changed" if is_moved else "the weights did not change"
        rows.append(Row(name="a step that learns", is_ok=is_moved, seen=seen))
        before, gap = statistics.mean(sight.gap for sight in still), after[0].gap
        is_alike = gap <= MAX_JUMP * before + ROUNDING
        rows.append(Row(name="gap after it", is_ok=is_alike, seen=f"{gap:.3g} nats, {before:.3g} before"))
    return rows


def _same(name: str, digests: list[str]) -> Row:
    differ = [str(step) for step, digest in enumerate(digests) if digest != digests[0]]
    seen = f"others than at step 0 at step {', '.join(differ)}" if differ else f"equal over {len(digests)} steps"
    return Row(name=name, is_ok=not differ, seen=seen)


def _flat(gaps: list[float]) -> Row:
    half = len(gaps) // 2
    first, second = statistics.mean(gaps[:half]), statistics.mean(gaps[half:])
    is_flat = second <= MAX_GROWTH * first + ROUNDING
    return Row(name="gap, flat", is_ok=is_flat, seen=f"{first:.3g} nats in the first half, {second:.3g} in the second")


def table(rows: list[Row]) -> str:
    """The rows for a person to read."""
    width = max(len(row.name) for row in rows)
    return "".join(f"{'ok    ' if row.is_ok else 'FAILED'}  {row.name:<{width}}  {row.seen}\n" for row in rows)


@record  # torchrun reports the traceback of the rank that failed
def main(arguments: list[str]) -> None:
    """Entry point of each rank: the number of steps, then what `load_config` takes. Collective."""
    num_steps, *rest = arguments
    run = start(rest)
    rows = check(run, int(num_steps), lambda config, ranks: Policy(config, ranks, run.model_folder))
    if run.ranks.is_main:
        sys.stdout.write(table(rows))
        sys.stdout.flush()
    run.rewards.close()
    stop_ranks()
    if not all(row.is_ok for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
