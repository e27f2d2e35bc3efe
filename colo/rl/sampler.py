"""What a step trains on: prompts to the engine, completed and scored groups back, now or a step late."""

import dataclasses
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from colo.config import Config
from colo.ranks import Ranks
from colo.rl.carry_over import CarryOver
from colo.rl.generator import Generator, request_seed
from colo.rl.prompts import prompts_at
from colo.rl.rewards import Rewards
from colo.rl.rollout_files import carried_of, carried_row, group_rows, groups_of, save_rollout
from colo.rl.schedule import OneOff, OnPolicy, Schedule
from colo.rl.scorer import Scorer
from colo.types import Completion, Group, Prompt, Request, Rollout, Sampling

logger = logging.getLogger(__name__)
GREEDY_SEED = 0
"""Of a request that draws nothing."""


class Sampler:
    """Which prompts a step takes, what is sampled for them, what it is worth, and which rollout a step trains on."""

    def __init__(
        self, config: Config, ranks: Ranks, prompts: list[Prompt], rewards: Rewards, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._prompts = prompts
        self._scorer = Scorer(ranks, rewards, tokenizer)
        rollout = config.rollout
        self._sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            min_p=rollout.min_p,
            presence_penalty=rollout.presence_penalty,
            frequency_penalty=rollout.frequency_penalty,
            repetition_penalty=rollout.repetition_penalty,
        )
        if config.unscored and ranks.is_main:
            logger.info(
                "%s: tokens are drawn from another distribution than the one that engine and policy score, which is "
                "over the whole vocabulary at temperature 1; nothing corrects for that (docs/logprobs.md)",
                ", ".join(f"rollout.{name} {value}" for name, value in config.unscored.items()),
            )
        self._carry_over = CarryOver(config, ranks, prompts, self._sampling) if rollout.carry_over else None
        self._schedule: Schedule = OneOff(config.num_steps) if config.schedule == "one_off" else OnPolicy()
        self._seconds: dict[str, float] = {}

    def rollout(self, engine: Generator, step: int) -> Rollout:
        """What this step trains on, and, by the schedule, what the next one will. Collective.

        Returns:
            The groups with their rewards. `rollout/staleness` in its metrics counts the steps since the first of its
            tokens was sampled; the times are those of this call.

        Raises:
            RewardError: a reward function raised.
        """
        self._seconds = {"time_s/generate": 0.0, "time_s/score": 0.0}
        rollout = self._schedule.rollout(step, lambda of_step: self._sample(engine, of_step, now=step))
        staleness = {"rollout/staleness": float(step - rollout.first_step)}
        if self._config.rollout.save and step % self._config.rollout.save == 0:
            save_rollout(Path(self._config.run_dir), step, rollout.groups, self._ranks)
        return Rollout(
            groups=rollout.groups,
            first_step=rollout.first_step,
            metrics=rollout.metrics | staleness | self._seconds,
        )

    def state(self) -> dict[str, Any]:
        """What is sampled and not trained on yet, of all replicas, as JSON holds it. Collective.

        Equal on every rank; empty where there is nothing. Rows alternate between replicas, so that another number of
        them can deal them out again.
        """
        state: dict[str, Any] = {}
        if self._schedule.pending is not None:
            pending = self._schedule.pending
            rows = [_marked(group_rows(group), group.prompt) for group in pending.groups]
            state = {"first_step": pending.first_step, "metrics": pending.metrics, "pending": self._interleaved(rows)}
        if self._carry_over is not None:
            held = [_marked([carried_row(group)], group.prompt)[0] for group in self._carry_over.held]
            state["carried"] = self._interleaved(held)
        return state | {"options": self._options()} if state else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, on any number of ranks.

        What was sampled with other options or prompts is left out, with a warning: `resume` may name the checkpoint of
        another run.
        """
        if not state:
            return
        by_row = {prompt.row: prompt for prompt in self._prompts}
        differ = self._differing(state, by_row)
        if differ:
            if self._ranks.is_main:
                logger.warning("what the checkpoint has sampled is left out: it is of other %s", ", ".join(differ))
            return
        mine = slice(self._ranks.replica, None, self._ranks.num_replicas)
        if "pending" in state:
            rows = [row for of_group in state["pending"][mine] for row in of_group]
            groups = groups_of(rows, lambda row: by_row[row["prompt_row"]])
            self._schedule.pending = Rollout(groups=groups, first_step=state["first_step"], metrics=state["metrics"])
        if self._carry_over is not None:
            self._carry_over.held = [carried_of(row, by_row[row["prompt_row"]]) for row in state["carried"][mine]]

    def _sample(self, engine: Generator, step: int, *, now: int) -> Rollout:
        """Sample and score, with the engine's weights in step `now`, what `step` trains on. Collective."""
        started = time.perf_counter()
        if self._carry_over is None:
            groups, first_step, counts = self._whole_groups(engine, step, f"step {now}: rollout"), now, {}
        else:
            groups, oldest = self._carry_over.sample(engine, step)
            first_step, counts = self._reduced(oldest, self._carry_over.counts(), f"step {now}: rollout")
        generated = time.perf_counter()
        metrics = self._scorer.score(groups, f"step {now}: scoring")
        self._seconds["time_s/generate"] += generated - started
        self._seconds["time_s/score"] += time.perf_counter() - generated
        return Rollout(groups=groups, first_step=first_step, metrics=metrics | counts)

    def _reduced(self, oldest: int, counts: dict[str, float], what: str) -> tuple[int, dict[str, float]]:
        """Over all replicas: the first step of any token, and the sums of counts as metrics. Collective."""
        first_step = -int(self._ranks.max(-oldest, what))
        is_counted = self._ranks.group_rank == 0  # the other ranks of a group hold the same
        total = self._ranks.sum({name: value if is_counted else 0.0 for name, value in counts.items()}, what)
        return first_step, {f"rollout/{name}": value for name, value in total.items()}

    def _interleaved(self, rows: list[Any]) -> list[Any]:
        """Every replica's first row, then every second, and so on. Collective."""
        of_ranks = self._ranks.gather(rows, "gathering what is sampled")
        of_replicas = of_ranks[:: self._ranks.tensor_parallel_size]
        return [row for of_turn in zip(*of_replicas, strict=True) for row in of_turn]

    def _options(self) -> dict[str, Any]:
        """With which what is held was sampled and scored; `rollout.save` and time limits have no part in that."""
        config = self._config
        rollout = dataclasses.asdict(config.rollout)
        del rollout["save"]
        return {
            "schedule": config.schedule,
            "seed": config.seed,
            "reward": config.reward_weights,
            "scoring.timeout_reward": config.scoring.timeout_reward,
        } | {f"rollout.{name}": value for name, value in rollout.items()}

    def _differing(self, state: dict[str, Any], by_row: dict[int, Prompt]) -> list[str]:
        was, now = state["options"], self._options()
        differ = [name for name, value in now.items() if name in was and was[name] != value]  # a newer one is not there
        rows = [row for of_group in state.get("pending", []) for row in of_group] + state.get("carried", [])
        prompts = {row["prompt_row"]: row for row in rows}
        is_known = all(number in by_row and _is_of(row, by_row[number]) for number, row in prompts.items())
        return differ if is_known else [*differ, "prompts"]

    def _whole_groups(self, engine: Generator, step: int, what: str) -> list[Group]:
        """Prompts are dealt to replicas in turn, so that every minibatch has as many on each."""
        config, ranks = self._config, self._ranks
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
        return to_groups(mine, engine.generate(requests, self._sampling, what))


def _marked(rows: list[dict[str, Any]], prompt: Prompt) -> list[dict[str, Any]]:
    """Rows of one prompt, with a digest of what a reward function is given of it."""
    return [row | {"prompt_digest": _digest(prompt)} for row in rows]


def _is_of(row: dict[str, Any], prompt: Prompt) -> bool:
    """Whether the row is of this prompt, with these fields; an older checkpoint's does not say with which."""
    has_tokens = row["prompt_token_ids"] == prompt.token_ids
    return has_tokens and ("prompt_digest" not in row or row["prompt_digest"] == _digest(prompt))


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(repr((prompt.text, sorted(prompt.fields.items()))).encode()).hexdigest()


def to_groups(slots: list[tuple[int, Prompt]], completions: list[Completion]) -> list[Group]:
    """The completions of each prompt, in order of slot and sample; `completions` is in that order already."""
    by_slot: dict[int, list[Completion]] = {}
    for completion in completions:
        by_slot.setdefault(completion.slot, []).append(completion)
    return [Group(slot=slot, prompt=prompt, completions=by_slot[slot]) for slot, prompt in slots]
