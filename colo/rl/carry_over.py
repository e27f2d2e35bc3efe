"""Carry-over: a rollout ends when enough groups are complete; the others go on in the next one, with newer weights."""

from dataclasses import replace

from colo.config import Config
from colo.ranks import Ranks
from colo.rl.generator import Generator, request_seed, require_same_tokens
from colo.rl.prompts import prompts_at
from colo.types import CarriedGroup, Completion, Group, Prompt, Request, Sampling, WeightVersionSpan

UNFINISHED = "abort"
"""The finish reason of a completion that goes on in the next rollout."""


class CarryOver:
    """This replica's groups under way. Between rollouts it holds `rollout.carry_over_extra` of them, over all replicas.

    A rollout submits what is held, completions so far as part of the prompt, and as many new prompts as a step trains
    on. It ends when that many groups are complete. Nothing is dropped: a completion that takes long is as likely to be
    trained on as another, only later. What would age past `rollout.max_carried_updates` is finished, and trained on,
    before the rollout ends; it never needs more places than a step has, since no more is held than a step takes.
    """

    def __init__(self, config: Config, ranks: Ranks, prompts: list[Prompt], sampling: Sampling) -> None:
        self._config, self._ranks, self._prompts, self._sampling = config, ranks, prompts, sampling
        self.held: list[CarriedGroup] = []
        """Oldest first; a complete one waits for a place in a step."""

    def sample(self, engine: Generator, step: int) -> tuple[list[Group], int]:
        """Complete this replica's share of a step's groups. Collective over the tensor-parallel group.

        Returns:
            The groups, whose slots follow the order in which they became complete, and the step in which the first of
            their tokens was sampled.

        Raises:
            RuntimeError: the ranks of the group sampled different tokens.
        """
        groups = [*self.held, *self._new_groups(step)]
        for group in groups:
            if not any(completion.token_ids for completion in group.completions):
                group.first_step = step
        oldest = step - self._config.max_carried_steps
        due = {index for index, group in enumerate(groups) if group.first_step <= oldest}
        num_needed = self._config.rollout.num_prompts // self._ranks.num_replicas
        order = self._advance(engine, groups, due, num_needed, f"step {step}: rollout")
        chosen = sorted(order, key=lambda index: index not in due)[:num_needed]  # stable: else as they were completed
        assert due <= set(chosen), f"all {len(due)} groups that may not age further must train in this step"
        self.held = [group for index, group in enumerate(groups) if index not in chosen]
        slots = range(self._ranks.replica, self._config.rollout.num_prompts, self._ranks.num_replicas)
        trained = [groups[index] for index in chosen]
        return [_to_group(group, slot) for group, slot in zip(trained, slots, strict=True)], min(
            group.first_step for group in trained
        )

    def counts(self) -> dict[str, float]:
        """This replica's `carried_groups`, and `carried_tokens` in completions that go on."""
        completions = [completion for group in self.held for completion in group.completions]
        return {
            "carried_groups": float(len(self.held)),
            "carried_tokens": float(sum(len(c.token_ids) for c in completions if c.finish_reason == UNFINISHED)),
        }

    def _new_groups(self, step: int) -> list[CarriedGroup]:
        """As many as bring what is under way to num_prompts + carry_over_extra, from the endless sequence of prompts.

        A function of the step: the first rollout takes the extra ones too, every later one the num_prompts after them.
        """
        rollout, ranks = self._config.rollout, self._ranks
        num_held = len(self.held) * ranks.num_replicas
        ahead = [
            prompt
            for at in (step, step + 1)
            for prompt in prompts_at(self._prompts, at, rollout.num_prompts, self._config.seed)
        ]
        new = list(enumerate(ahead[num_held : rollout.num_prompts + self._config.num_extra_prompts]))
        return [
            CarriedGroup(
                prompt=prompt,
                step=step,
                slot=slot,
                first_step=step,
                completions=[_not_begun(slot, sample) for sample in range(rollout.group_size)],
            )
            for slot, prompt in new[ranks.replica :: ranks.num_replicas]
        ]

    def _advance(
        self, engine: Generator, groups: list[CarriedGroup], due: set[int], num_needed: int, what: str
    ) -> list[int]:
        """Sample until `num_needed` groups are complete, and each that is due.

        Returns:
            The complete groups' places in `groups`, in the order in which they became complete.
        """
        engine.require_ready()  # a paused one would queue requests, and take no step
        for index, group in enumerate(groups):
            for completion in group.completions:
                if completion.finish_reason == UNFINISHED:
                    engine.submit(self._request(index, group, completion), self._sampling)
        order = [index for index, group in enumerate(groups) if is_complete(group)]
        parts: list[Completion] = []
        while len(order) < num_needed or not due <= set(order):
            engine.step()
            finished = engine.finished()
            _add(groups, finished)
            parts += finished
            order += sorted({part.slot for part in finished if is_complete(groups[part.slot])})
            self._ranks.report(what, f"{len(order)} of {num_needed} groups complete")
        aborted = engine.abort()
        _add(groups, aborted)
        require_same_tokens([*parts, *aborted], self._ranks, what)
        return order

    def _request(self, index: int, group: CarriedGroup, completion: Completion) -> Request:
        num_tokens = len(completion.token_ids)
        return Request(
            slot=index,
            sample=completion.sample,
            prompt_token_ids=group.prompt.token_ids + completion.token_ids,
            seed=request_seed(self._config.seed, group.step, group.slot, completion.sample, num_tokens),
            max_new_tokens=self._config.rollout.max_new_tokens - num_tokens,
        )


def is_complete(group: CarriedGroup) -> bool:
    """Whether none of its completions goes on."""
    return all(completion.finish_reason != UNFINISHED for completion in group.completions)


def joined(before: Completion, part: Completion) -> Completion:
    """A completion and what was sampled after it: tokens, logprobs and spans one after the other."""
    offset = len(before.token_ids)
    spans = list(before.spans)
    for span in part.spans:
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=offset + span.end)
        elif span.end > span.start:
            spans.append(WeightVersionSpan(version=span.version, start=offset + span.start, end=offset + span.end))
    return replace(
        before,
        token_ids=before.token_ids + part.token_ids,
        logprobs=before.logprobs + part.logprobs,
        finish_reason=part.finish_reason,
        spans=spans,
        num_cached_tokens=before.num_cached_tokens + part.num_cached_tokens,
    )


def _add(groups: list[CarriedGroup], parts: list[Completion]) -> None:
    """Append what was sampled; a part's slot is its group's place in `groups`."""
    for part in parts:
        completions = groups[part.slot].completions
        completions[part.sample] = joined(completions[part.sample], part)


def _not_begun(slot: int, sample: int) -> Completion:
    return Completion(
        slot=slot, sample=sample, token_ids=[], logprobs=[], finish_reason=UNFINISHED, spans=[], num_cached_tokens=0
    )


def _to_group(group: CarriedGroup, slot: int) -> Group:
    completions = [replace(completion, slot=slot) for completion in group.completions]
    return Group(slot=slot, prompt=group.prompt, completions=completions)
