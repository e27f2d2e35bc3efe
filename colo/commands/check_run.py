"""colo check run: may a run with this recipe be trusted? The loop itself, once without learning and once with."""

import dataclasses
import datetime
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.errors import record

from colo.commands.check_run_table import FAILED, Row, Sight, judge, table
from colo.config import Config
from colo.engine.engine import Engine
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import GIVE_WAY_S, Ranks, stop_ranks
from colo.rl.batch import batch_size, make_batch
from colo.rl.sampler import GREEDY_SEED, Sampler
from colo.start import Run, or_refused, start
from colo.types import Prompt, Request, Sampling

NUM_PROBES = 4
"""Prompts that are completed greedily at each step."""
PROBE_TOKENS = 16
"""Length limit of their completions."""
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=())
SAME_ERROR_S = 5 * GIVE_WAY_S
"""How long after the first rank's error one of another rank can be the same one: those that are told of it give way."""


def check(run: Run, num_steps: int, make_policy: Callable[[Config, Ranks], Policy]) -> list[Row]:
    """Run `num_steps` steps with learning rate 0, one that learns, and on until one trains on its weights. Collective.

    Returns:
        The table's rows; after one that failed because a step raised there are no others.

    Raises:
        RuntimeError: some ranks failed, and others did not.
    """
    still, learning = _configs(run.config, num_steps)
    run, ranks = dataclasses.replace(run, config=still), run.ranks
    tensors = stand_ins(run.model_folder, getattr(torch, still.policy.dtype))
    engine = Engine(still, ranks, run.model_folder, tensors, run.baseline)
    or_refused(engine.require_reloadable, ranks)
    policy = make_policy(still, ranks)
    engine.account_for(policy.held_bytes)
    sampler = Sampler(still, ranks, run.prompts, run.rewards, run.tokenizer)
    sights: list[Sight] = []
    for step in range(still.num_steps):
        policy.config = learning if step == num_steps else still
        try:
            sights.append(_step(run, engine, policy, sampler, step))
        except RuntimeError as error:
            sys.stderr.write(f"rank {ranks.rank}: step {step}: {type(error).__name__}: {error}\n")
            if not failed_alike(ranks, SAME_ERROR_S):
                raise
            return [*judge(sights, num_steps), Row(name=f"step {step}", verdict=FAILED, seen=str(error))]
        if sights[-1].first_step > num_steps:
            break
    engine.close()
    return judge(sights, num_steps)


def _configs(config: Config, num_steps: int) -> tuple[Config, Config]:
    """The recipe without learning, for as many steps as the check may take, and with it.

    Of what a step after the learning one trains on, some may have been sampled before: with one_off for one step, with
    carry-over for as many as a group may be carried.
    """
    lag = config.max_carried_steps if config.rollout.carry_over else int(config.schedule == "one_off")
    constant = dataclasses.replace(config.update, schedule="constant", warmup_steps=0)
    learning = dataclasses.replace(
        config,
        update=constant,
        num_steps=num_steps + 1 + lag + 1,
        reload=dataclasses.replace(config.reload, proof="every"),
    )
    return dataclasses.replace(learning, update=dataclasses.replace(constant, lr=0.0)), learning


def failed_alike(ranks: Ranks, limit_s: float) -> bool:
    """Whether every rank fails in this step, each for itself: then all can go on. For a rank that has failed.

    Through the store, since ranks that did not fail may be waiting in any collective.
    """
    ranks.store.set(f"check/failed/{ranks.rank}", "")
    try:
        others = [f"check/failed/{rank}" for rank in range(ranks.world_size)]
        ranks.store.wait(others, datetime.timedelta(seconds=limit_s))
    except DistStoreError:
        # One that fails later does so because this one is gone.
        ranks.store.set("check/parted", "")
    return not ranks.store.check(["check/parted"])


def _step(run: Run, engine: Engine, policy: Policy, sampler: Sampler, step: int) -> Sight:
    ranks = run.ranks
    mine = hashlib.sha256()
    for _, shard in policy.weights():
        mine.update(shard.local.detach().float().cpu().contiguous().numpy().tobytes())
    step_aside = policy.step_aside if run.config.policy.offload == "all" else None
    with engine.awake(policy.weights(), version=str(policy.num_updates), step_aside=step_aside):
        proven = engine.prove()
        probes = _probes(run.prompts, *engine.collective_rpc(_block_and_limit, read_only=True))
        completions = engine.generate(probes, GREEDY, "probing")
        (again,) = engine.generate(probes[:1], GREEDY, "probing")
        rollout = sampler.rollout(engine, step)
    batch = make_batch(
        rollout.groups,
        run.config,
        group_rank=ranks.group_rank,
        group_size=ranks.tensor_parallel_size,
        num_updates=policy.num_updates,
    )
    with engine.aside(*batch_size(batch), lambda: {"gradients": policy.gradient_bytes}):
        metrics = policy.update(batch)
    seen = (
        mine.hexdigest(),
        proven,
        [completion.token_ids for completion in completions],
        completions[0].num_cached_tokens,
        again.num_cached_tokens,
        any(len(set(group.rewards)) > 1 for group in rollout.groups),
    )
    policies, engines, tokens, cached, cached_again, rewarded = zip(*ranks.gather(seen, "comparing ranks"), strict=True)
    return Sight(
        policy="".join(policies),
        engine="".join(engines),
        tokens=list(tokens),
        num_cached=max(cached),
        num_cached_again=min(cached_again),
        gap=metrics.get("gap/mean_abs"),
        first_step=rollout.first_step,
        is_rewarded=any(rewarded),
    )


def _block_and_limit(worker: Any) -> tuple[int, int]:
    """Tokens of a block of vLLM's KV cache, and of a prompt with its completion at most."""
    config = worker.vllm_config
    return config.cache_config.block_size, config.model_config.max_model_len


def _probes(prompts: list[Prompt], block_size: int, max_tokens: int) -> list[Request]:
    """Greedy requests of prompts, each repeated until it is longer than a block, where the engine takes one so long.

    The prefix cache holds whole blocks, and leaves the last token of a prompt to be computed: a shorter prompt would
    read nothing from it, whatever it held.
    """
    probes = []
    for slot, prompt in enumerate(prompts[:NUM_PROBES]):
        ids = prompt.token_ids
        if len(ids) <= block_size < max_tokens - 1:
            ids = (ids * (block_size // len(ids) + 1))[: block_size + 1]
        limit = min(PROBE_TOKENS, max_tokens - len(ids))
        probes.append(Request(slot=slot, sample=0, prompt_token_ids=ids, seed=GREEDY_SEED, max_new_tokens=limit))
    return probes


def tell(rows: list[Row], ranks: Ranks) -> None:
    """Print the table on rank 0; no rank ends before, or torchrun would end all. Collective, also without a group."""
    if ranks.is_main:
        sys.stdout.write(table(rows))
        sys.stdout.flush()
        ranks.store.set("check/told", "")
    else:
        ranks.store.wait(["check/told"])


@record  # torchrun reports the traceback of the rank that failed
def main(arguments: list[str]) -> None:
    """Entry point of each rank: the number of steps, then what `load_config` takes. Collective."""
    num_steps, *rest = arguments
    run = start(rest)
    rows = check(run, int(num_steps), lambda config, ranks: Policy(config, ranks, run.model_folder))
    tell(rows, run.ranks)
    run.rewards.close()
    if any(row.verdict == FAILED for row in rows):
        sys.exit(1)  # the group is left only on success
    stop_ranks()


if __name__ == "__main__":
    main(sys.argv[1:])
