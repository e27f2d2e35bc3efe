"""Groups to micro-batches: who trains on which completion, and what a rollout looks like in numbers."""

import math
from dataclasses import dataclass

import torch

from colo.config import Config
from colo.rl.losses import ALGORITHMS
from colo.types import Batch, Completion, Group, MicroBatch


@dataclass(frozen=True)
class _Row:
    """One completion that trains on this rank."""

    prompt_token_ids: list[int]
    completion: Completion
    advantage: float
    ages: list[int]
    """As `MicroBatch.ages_BT`, for each token of the completion."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion.token_ids)


def make_batch(groups: list[Group], config: Config, *, num_updates: int, group_rank: int, group_size: int) -> Batch:
    """Cut one rank's share of a replica's completions into minibatches and micro-batches.

    Advantages come from whole groups. Of the replica's completions, in order of (slot, sample), this rank trains on
    each `group_size`-th, so the ranks of a tensor-parallel group, which all hold the same ones, train on none twice.
    A prompt's completions are all in minibatch `slot * num_minibatches // num_prompts`.

    Args:
        groups: The replica's groups, scored; may be empty.
        config: Gives algorithm, loss.mask_truncated, batch.max_tokens and the number of minibatches.
        num_updates: Optimizer updates that are in the policy now; what a completion's version labels are counted from.
        group_rank: This rank's place in its tensor-parallel group.
        group_size: Ranks in that group.

    Returns:
        CPU tensors. Any minibatch's list of micro-batches may be empty. A completion without loss tokens (masked, or
        without tokens) is in none. `metrics` counts this rank's `num_sequences`, `num_loss_tokens`,
        `num_padding_tokens`, `num_micro_batches` and `num_truncated_masked`.

    Raises:
        RuntimeError: a completion whose engine logprobs are missing or not finite, whose spans do not cover its
            tokens, or whose version labels are not numbers of updates, `num_updates` at most.
    """
    num_minibatches = config.update.num_minibatches
    rows: list[list[_Row]] = [[] for _ in range(num_minibatches)]
    place, num_truncated_masked = 0, 0
    for group in sorted(groups, key=lambda group: group.slot):
        minibatch = rows[group.slot * num_minibatches // config.rollout.num_prompts]
        for completion, advantage in zip(group.completions, _advantages(group, config.algorithm), strict=True):
            is_mine = place % group_size == group_rank
            place += 1
            if not is_mine:
                continue
            if config.loss.mask_truncated and completion.finish_reason == "length":
                num_truncated_masked += 1
            elif completion.token_ids:
                _check_logprobs(completion)
                ages = _ages(completion, num_updates)
                minibatch.append(_Row(group.prompt.token_ids, completion, advantage, ages))
    minibatches = [_micro_batches(minibatch, config.batch.max_tokens) for minibatch in rows]
    metrics = _counts([micro_batch for minibatch in minibatches for micro_batch in minibatch])
    metrics["num_truncated_masked"] = float(num_truncated_masked)
    num_tokens = sum(row.num_tokens for minibatch in rows for row in minibatch)
    metrics["num_padding_tokens"] -= num_tokens
    return Batch(minibatches=minibatches, max_new_tokens=config.rollout.max_new_tokens, metrics=metrics)


def rollout_sums(groups: list[Group]) -> dict[str, float]:
    """Sum over groups what `rollout_metrics` needs; the sums add up over replicas.

    A tensor-parallel group's ranks hold the same groups: all but one pass [] and so add zeros.
    """
    completions = [completion for group in groups for completion in group.completions]
    return {
        "num_groups": float(len(groups)),
        "num_completions": float(len(completions)),
        "num_tokens": float(sum(len(completion.token_ids) for completion in completions)),
        "num_truncated": float(sum(completion.finish_reason == "length" for completion in completions)),
        "num_equal_groups": float(sum(min(group.rewards) == max(group.rewards) for group in groups)),
        "reward_sum": math.fsum(reward for group in groups for reward in group.rewards),
        "reward_std_sum": math.fsum(_std(group.rewards) for group in groups),
    }


def longest_completion(groups: list[Group]) -> float:
    """The most tokens of a completion; 0 without groups. Take the largest over replicas."""
    return float(max((len(completion.token_ids) for group in groups for completion in group.completions), default=0))


def rollout_metrics(sums: dict[str, float], longest: float) -> dict[str, float]:
    """Turn `rollout_sums` over all replicas, and the longest completion, into metrics.

    Returns:
        `reward/mean`, `reward/std` (sample standard deviation within a group, mean over groups),
        `reward/num_equal_groups`, `tokens/generated`, `tokens/completion_mean`, `tokens/completion_max` and
        `rollout/truncated` (completions that ran into the length limit).
    """
    return {
        "reward/mean": sums["reward_sum"] / sums["num_completions"],
        "reward/std": sums["reward_std_sum"] / sums["num_groups"],
        "reward/num_equal_groups": sums["num_equal_groups"],
        "tokens/generated": sums["num_tokens"],
        "tokens/completion_mean": sums["num_tokens"] / sums["num_completions"],
        "tokens/completion_max": longest,
        "rollout/truncated": sums["num_truncated"],
    }


def _advantages(group: Group, algorithm: str) -> list[float]:
    assert len(group.rewards) == len(group.completions), f"slot {group.slot} must have a reward for each completion"
    rewards_PG = torch.tensor([group.rewards], dtype=torch.float32)
    return ALGORITHMS[algorithm].advantages(rewards_PG)[0].tolist()


def _ages(completion: Completion, num_updates: int) -> list[int]:
    """How many updates old the weights were that sampled each token."""
    name = f"completion {completion.sample} of slot {completion.slot}"
    ages: list[int] = []
    for span in completion.spans:
        if not (span.version.isascii() and span.version.isdigit()):
            raise RuntimeError(f"{name} must have numbers of updates as version labels, got {span.version!r}")
        age = num_updates - int(span.version)
        if age < 0:
            raise RuntimeError(f"{name} must be of weights with at most {num_updates} updates, got {span.version}")
        if span.start != len(ages) or span.end <= span.start:
            raise RuntimeError(f"{name} must have spans that follow on each other, got [{span.start}, {span.end})")
        ages += [age] * (span.end - span.start)
    if len(ages) != len(completion.token_ids):
        raise RuntimeError(f"{name} must have spans over its {len(completion.token_ids)} tokens, got {len(ages)}")
    return ages


def _check_logprobs(completion: Completion) -> None:
    name = f"completion {completion.sample} of slot {completion.slot}"
    if len(completion.logprobs) != len(completion.token_ids):
        raise RuntimeError(
            f"{name} must have an engine logprob for each of its {len(completion.token_ids)} tokens, "
            f"got {len(completion.logprobs)}"
        )
    for position, logprob in enumerate(completion.logprobs):
        if not math.isfinite(logprob):
            raise RuntimeError(f"{name} must have finite engine logprobs, got {logprob} at token {position}")


def _micro_batches(rows: list[_Row], max_tokens: int) -> list[MicroBatch]:
    # Longest first: little padding, and the largest micro-batch, which decides the memory needed, comes first.
    rows = sorted(rows, key=lambda row: -row.num_tokens)
    micro_batches = []
    while rows:
        num_rows = max(1, max_tokens // rows[0].num_tokens)
        micro_batches.append(_pack(rows[:num_rows]))
        rows = rows[num_rows:]
    return micro_batches


def _pack(rows: list[_Row]) -> MicroBatch:
    shape = len(rows), max(row.num_tokens for row in rows)
    micro_batch = MicroBatch(
        token_ids_BT=torch.zeros(shape, dtype=torch.int64),
        loss_mask_BT=torch.zeros(shape, dtype=torch.bool),
        engine_logprobs_BT=torch.zeros(shape, dtype=torch.float32),
        ages_BT=torch.zeros(shape, dtype=torch.int32),
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    )
    for index, row in enumerate(rows):
        start, end = len(row.prompt_token_ids), row.num_tokens
        assert start > 0, "a prompt must have a token, since the first token has nothing to be predicted from"
        micro_batch.token_ids_BT[index, :end] = torch.tensor(row.prompt_token_ids + row.completion.token_ids)
        micro_batch.loss_mask_BT[index, start:end] = True
        micro_batch.engine_logprobs_BT[index, start:end] = torch.tensor(row.completion.logprobs, dtype=torch.float32)
        micro_batch.ages_BT[index, start:end] = torch.tensor(row.ages, dtype=torch.int32)
    return micro_batch


def _counts(micro_batches: list[MicroBatch]) -> dict[str, float]:
    return {
        "num_sequences": float(sum(micro_batch.token_ids_BT.shape[0] for micro_batch in micro_batches)),
        "num_loss_tokens": float(sum(int(micro_batch.loss_mask_BT.sum()) for micro_batch in micro_batches)),
        "num_padding_tokens": float(sum(micro_batch.token_ids_BT.numel() for micro_batch in micro_batches)),
        "num_micro_batches": float(len(micro_batches)),
    }


def _std(rewards: list[float]) -> float:
    if len(rewards) < 2:
        return 0.0  # an evaluation samples one completion a prompt
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def batch_size(batch: Batch) -> tuple[int, int]:
    """Tokens of this rank's largest micro-batch, padding counted, and micro-batches of its largest minibatch."""
    num_tokens = max((micro.token_ids_BT.numel() for micros in batch.minibatches for micro in micros), default=0)
    return num_tokens, max(len(micros) for micros in batch.minibatches)
