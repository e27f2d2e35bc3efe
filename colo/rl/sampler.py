"""One rollout phase: prompts to the engine, completed and scored groups back."""

import hashlib
import json
import time
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from colo.config import Config
from colo.ranks import Ranks
from colo.rl.batch import longest_completion, rollout_metrics, rollout_sums
from colo.rl.prompts import prompts_at
from colo.rl.rewards import Rewards
from colo.types import Completion, Group, Prompt, Request, Rollout, Sampling

GREEDY_SEED = 0
"""Of a request that draws nothing."""


class Generator(Protocol):
    """What the sampler needs of an engine."""

    def generate(self, requests: list[Request], sampling: Sampling, what: str) -> list[Completion]:
        """Sample every request to its end, in order."""
        ...


class Sampler:
    """Which prompts a step takes, what is sampled for them, and what it is worth."""

    def __init__(
        self, config: Config, ranks: Ranks, prompts: list[Prompt], rewards: Rewards, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._prompts = prompts
        self._scorer = Scorer(ranks, rewards, tokenizer)
        rollout = config.rollout
        self._sampling = Sampling(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, stop=tuple(rollout.stop)
        )

    def rollout(self, engine: Generator, step: int) -> Rollout:
        """Sample and score this step's groups. Collective.

        Prompts are dealt to replicas in turn, so that every minibatch has as many on each.

        Raises:
            RewardError: a reward function raised.
        """
        config, ranks = self._config, self._ranks
        started = time.perf_counter()
        prompts = prompts_at(self._prompts, step, config.rollout.num_prompts, config.seed)
        mine = list(enumerate(prompts))[ranks.replica :: ranks.num_replicas]
        requests = [
            Request(
                slot=slot,
                sample=sample,
                prompt_token_ids=prompt.token_ids,
                seed=request_seed(config.seed, step, slot, sample),
                max_new_tokens=config.rollout.max_new_tokens,
            )
            for slot, prompt in mine
            for sample in range(config.rollout.group_size)
        ]
        completions = engine.generate(requests, self._sampling, f"step {step}: rollout")
        generated = time.perf_counter()
        groups = to_groups(mine, completions)
        metrics = self._scorer.score(groups, f"step {step}: scoring")
        metrics |= {"time_s/generate": generated - started, "time_s/score": time.perf_counter() - generated}
        if config.rollout.save and step % config.rollout.save == 0:
            save_rollout(Path(config.run_dir), step, groups, ranks)
        return Rollout(groups=groups, metrics=metrics)


class Scorer:
    """Decodes completions, has them scored once per tensor-parallel group, and reduces the numbers."""

    def __init__(self, ranks: Ranks, rewards: Rewards, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ranks = ranks
        self._rewards = rewards
        self._tokenizer = tokenizer

    def score(self, groups: list[Group], what: str) -> dict[str, float]:
        """Fill in `texts` and `rewards`, and return the metrics over all replicas. Collective.

        The ranks of a tensor-parallel group hold the same completions: each scores its share, and they exchange the
        results, so that a reward function sees each completion once.
        """
        ranks = self._ranks
        for group in groups:
            group.texts = self._tokenizer.batch_decode(
                [c.token_ids for c in group.completions], skip_special_tokens=True
            )
        items = [(group.prompt, text) for group in groups for text in group.texts]
        mine = items[ranks.group_rank :: ranks.tensor_parallel_size]

        def progress(done: int, total: int) -> None:
            ranks.report(what, f"{done} of {total} done")

        share = ranks.agreed(lambda: self._rewards.score(mine, progress), what)
        scores = [share[rank][place] for place, rank in self._dealt(len(items))]
        for index, group in enumerate(groups):
            size = len(group.completions)
            group.rewards = [score.total for score in scores[index * size : (index + 1) * size]]
        counted = groups if ranks.group_rank == 0 else []  # its other ranks hold the same
        sums = rollout_sums(counted)
        sums["timeouts"] = sum(float(len(score.timed_out)) for score in scores) if counted else 0.0
        sums["cached_tokens"] = sum((float(c.num_cached_tokens) for group in counted for c in group.completions), 0.0)
        for name in self._rewards.names:
            sums[f"by/{name}"] = sum((score.by_function[name] for score in scores), 0.0) if counted else 0.0
        totals = ranks.sum(sums, what)
        metrics = rollout_metrics(totals, ranks.max(longest_completion(groups), what))
        metrics |= {"reward/num_timeouts": totals["timeouts"], "engine/cached_tokens": totals["cached_tokens"]}
        if len(self._rewards.names) > 1:
            metrics |= {
                f"reward/{name}": totals[f"by/{name}"] / totals["num_completions"] for name in self._rewards.names
            }
        return metrics

    def _dealt(self, num_items: int) -> list[tuple[int, int]]:
        """(place in the scoring rank's share, that global rank) for each item of this replica."""
        size, members = self._ranks.tensor_parallel_size, self._ranks.group_ranks
        return [(index // size, members[index % size]) for index in range(num_items)]


def to_groups(slots: list[tuple[int, Prompt]], completions: list[Completion]) -> list[Group]:
    """The completions of each prompt, in order of slot and sample; `completions` is in that order already."""
    by_slot: dict[int, list[Completion]] = {}
    for completion in completions:
        by_slot.setdefault(completion.slot, []).append(completion)
    return [Group(slot=slot, prompt=prompt, completions=by_slot[slot]) for slot, prompt in slots]


def request_seed(run_seed: int, step: int, slot: int, sample: int) -> int:
    """The seed of one request: a 63-bit hash of what identifies it, the same on every rank and platform."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{slot}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def save_rollout(run_dir: Path, step: int, groups: list[Group], ranks: Ranks) -> None:
    """Write rollouts/step-N.jsonl, one completion a line in order of slot and sample. Collective; rank 0 writes."""
    rows = [
        {
            "slot": group.slot,
            "sample": completion.sample,
            "prompt": group.prompt.text,
            "text": text,
            "reward": reward,
            "finish_reason": completion.finish_reason,
            "prompt_token_ids": group.prompt.token_ids,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "spans": [[span.start, span.end, span.version] for span in completion.spans],
        }
        for group in (groups if ranks.group_rank == 0 else [])
        for completion, text, reward in zip(group.completions, group.texts, group.rewards, strict=True)
    ]
    gathered = ranks.gather(rows, f"step {step}: saving the rollout")

    def write() -> None:
        path = run_dir / "rollouts" / f"step-{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = sorted(
            (row for rank_rows in gathered for row in rank_rows), key=lambda row: (row["slot"], row["sample"])
        )
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines))
        partial.replace(path)

    ranks.from_main(write, f"step {step}: saving the rollout")
