"""Groups to micro-batches, and the numbers of a rollout."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from colo.config import BatchConfig, Config, LossConfig, RolloutConfig, UpdateConfig
from colo.rl.batch import longest_completion, make_batch, rollout_metrics, rollout_sums
from colo.types import Batch, Completion, Group, Prompt, WeightVersionSpan


def make_config(**sections: Any) -> Config:
    return Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="a.b",
        reward="a.b",
        num_steps=1,
        **{"rollout": RolloutConfig(num_prompts=4, group_size=3, max_new_tokens=9), **sections},
    )


def make_group(
    slot: int, lengths: list[int], rewards: list[float], *, finish_reasons: list[str] | None = None
) -> Group:
    """Tokens and logprobs that tell where they are from: 100 * slot + 10 * sample + position."""
    completions = [
        Completion(
            slot=slot,
            sample=sample,
            token_ids=[1000 + 100 * slot + 10 * sample + position for position in range(length)],
            logprobs=[-(1.0 + 100 * slot + 10 * sample + position) for position in range(length)],
            finish_reason=finish_reasons[sample] if finish_reasons else "stop",
            spans=[WeightVersionSpan(version="0", start=0, end=length)],
            num_cached_tokens=0,
        )
        for sample, length in enumerate(lengths)
    ]
    prompt = Prompt(row=slot, token_ids=list(range(5, 7 + slot)), text="", fields={})
    return Group(slot=slot, prompt=prompt, completions=completions, rewards=rewards)


def four_groups() -> list[Group]:
    return [make_group(slot, [3, 1 + slot, 5], [1.0, 0.0, float(slot % 2)]) for slot in range(4)]


def trained_tokens(batch: Batch) -> list[tuple[int, float, float]]:
    """(token, its engine logprob, its advantage) of each loss token, sorted."""
    found = []
    for micro in (micro for minibatch in batch.minibatches for micro in minibatch):
        for row in range(micro.token_ids_BT.shape[0]):
            mask_T = micro.loss_mask_BT[row]
            tokens, logprobs = micro.token_ids_BT[row][mask_T].tolist(), micro.engine_logprobs_BT[row][mask_T].tolist()
            found += [(*pair, round(micro.advantages_B[row].item(), 4)) for pair in zip(tokens, logprobs, strict=True)]
    return sorted(found)


def test_a_micro_batch_written_out_by_hand() -> None:
    config = make_config(algorithm="dr_grpo", rollout=RolloutConfig(num_prompts=1, group_size=2, max_new_tokens=9))
    batch = make_batch([make_group(0, [1, 3], [0.0, 1.0])], config, num_updates=0, group_rank=0, group_size=1)
    ((micro,),) = batch.minibatches
    assert micro.token_ids_BT.tolist() == [[5, 6, 1010, 1011, 1012], [5, 6, 1000, 0, 0]]
    assert micro.loss_mask_BT.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert micro.engine_logprobs_BT.tolist() == [[0, 0, -11, -12, -13], [0, 0, -1, 0, 0]]
    assert micro.advantages_B.tolist() == [0.5, -0.5]
    assert batch.max_new_tokens == 9
    assert batch.metrics == {
        "num_sequences": 2,
        "num_loss_tokens": 4,
        "num_padding_tokens": 2,
        "num_micro_batches": 1,
        "num_truncated_masked": 0,
    }


@pytest.mark.parametrize("group_size", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 12, 20, 8192])
def test_every_loss_token_trains_once_however_the_step_is_cut_up(group_size: int, max_tokens: int) -> None:
    whole = trained_tokens(make_batch(four_groups(), make_config(), num_updates=0, group_rank=0, group_size=1))
    assert len(whole) == 4 * 8 + 1 + 2 + 3 + 4
    config = make_config(batch=BatchConfig(max_tokens=max_tokens), update=UpdateConfig(num_minibatches=2))
    shares = [
        make_batch(four_groups(), config, num_updates=0, group_rank=rank, group_size=group_size)
        for rank in range(group_size)
    ]
    assert sorted(token for share in shares for token in trained_tokens(share)) == whole
    num_sequences = [share.metrics["num_sequences"] for share in shares]
    assert max(num_sequences) - min(num_sequences) <= 1
    for micro in (micro for share in shares for minibatch in share.minibatches for micro in minibatch):
        assert micro.token_ids_BT.numel() <= max_tokens or micro.token_ids_BT.shape[0] == 1
        assert not micro.loss_mask_BT[:, 0].any()


def test_a_slot_decides_the_minibatch_also_where_a_replica_holds_only_some_slots() -> None:
    config = make_config(update=UpdateConfig(num_minibatches=2))
    batch = make_batch(four_groups()[1::2], config, num_updates=0, group_rank=0, group_size=1)
    slots = [
        {token // 100 - 10 for micro in minibatch for token in micro.token_ids_BT[micro.loss_mask_BT].tolist()}
        for minibatch in batch.minibatches
    ]
    assert slots == [{1}, {3}]
    first_only = make_batch(four_groups()[:2], config, num_updates=0, group_rank=0, group_size=1)
    assert [len(minibatch) > 0 for minibatch in first_only.minibatches] == [True, False]


def test_a_rank_with_nothing_has_empty_minibatches() -> None:
    config = make_config(update=UpdateConfig(num_minibatches=4))
    assert make_batch([], config, num_updates=0, group_rank=0, group_size=1).minibatches == [[], [], [], []]


def test_masked_truncated_completions_train_nothing_but_count_in_the_baseline() -> None:
    group = make_group(0, [2, 9, 2], [1.0, 0.0, 0.0], finish_reasons=["stop", "length", "stop"])
    kept = make_batch([group], make_config(algorithm="rloo"), num_updates=0, group_rank=0, group_size=1)
    assert {advantage for _, _, advantage in trained_tokens(kept)} == {1.0, -0.5}
    config = make_config(algorithm="rloo", loss=LossConfig(mask_truncated=True))
    masked = make_batch([group], config, num_updates=0, group_rank=0, group_size=1)
    assert trained_tokens(masked) == [row for row in trained_tokens(kept) if not 1010 <= row[0] < 1020]
    assert masked.metrics["num_truncated_masked"] == 1
    assert masked.metrics["num_sequences"] == 2


def test_a_missing_logprob_is_an_error_that_names_the_completion() -> None:
    group = make_group(2, [2, 3, 2], [1.0, 0.0, 0.0])
    group.completions[1].logprobs.pop()
    with pytest.raises(
        RuntimeError, match="completion 1 of slot 2 must have an engine logprob for each of its 3 tokens"
    ):
        make_batch([group], make_config(), num_updates=0, group_rank=0, group_size=1)
    group.completions[1].logprobs.append(-math.inf)
    with pytest.raises(
        RuntimeError, match="completion 1 of slot 2 must have finite engine logprobs, got -inf at token 2"
    ):
        make_batch([group], make_config(), num_updates=0, group_rank=0, group_size=1)


def versions(*spans: tuple[str, int, int]) -> list[WeightVersionSpan]:
    return [WeightVersionSpan(version=version, start=start, end=end) for version, start, end in spans]


def with_spans(group: Group, sample: int, spans: list[WeightVersionSpan]) -> Group:
    completions = list(group.completions)
    completions[sample] = replace(completions[sample], spans=spans)
    return replace(group, completions=completions)


def test_ages_count_the_updates_since_each_token_was_sampled() -> None:
    config = make_config(rollout=RolloutConfig(num_prompts=1, group_size=2, max_new_tokens=9))
    group = with_spans(make_group(0, [1, 3], [0.0, 1.0]), 0, versions(("7", 0, 1)))
    group = with_spans(group, 1, versions(("4", 0, 2), ("6", 2, 3)))
    ((micro,),) = make_batch([group], config, num_updates=7, group_rank=0, group_size=1).minibatches
    assert micro.ages_BT.dtype == torch.int32
    assert micro.ages_BT.tolist() == [[0, 0, 3, 3, 1], [0, 0, 0, 0, 0]]
    assert not micro.ages_BT[~micro.loss_mask_BT].any()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (versions(("models/x", 0, 3)), "must have numbers of updates as version labels, got 'models/x'"),
        (versions(("-1", 0, 3)), "must have numbers of updates as version labels, got '-1'"),
        (versions(("8", 0, 3)), "must be of weights with at most 7 updates, got 8"),
        (versions(("7", 0, 2)), "must have spans over its 3 tokens, got 2"),
        (versions(("6", 0, 1), ("7", 2, 3)), r"must have spans that follow on each other, got \[2, 3\)"),
        (versions(("6", 0, 2), ("7", 2, 2), ("7", 2, 3)), r"must have spans that follow on each other, got \[2, 2\)"),
        ([], "must have spans over its 3 tokens, got 0"),
    ],
)
def test_a_span_that_says_nothing_or_too_much_is_an_error_that_names_the_completion(
    spans: list[WeightVersionSpan], message: str
) -> None:
    group = with_spans(make_group(2, [2, 3, 2], [1.0, 0.0, 0.0]), 1, spans)
    for sample in (0, 2):
        group = with_spans(group, sample, versions(("7", 0, 2)))
    with pytest.raises(RuntimeError, match=f"completion 1 of slot 2 {message}"):
        make_batch([group], make_config(), num_updates=7, group_rank=0, group_size=1)


def test_rollout_metrics_add_up_over_replicas() -> None:
    groups = [
        make_group(0, [3, 1, 5], [1.0, 0.0, 0.0], finish_reasons=["stop", "length", "length"]),
        make_group(1, [2, 2, 2], [0.1, 0.1, 0.1]),
    ]
    parts = [rollout_sums(part) for part in (groups[:1], groups[1:], [])]  # the last: a rank that holds a copy
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    metrics = rollout_metrics(sums, max(longest_completion(part) for part in (groups[:1], groups[1:], [])))
    expected = {
        "reward/mean": 1.3 / 6,
        "reward/std": math.sqrt(1 / 3) / 2,  # 0.57735 in the first group, 0 in the second
        "reward/num_equal_groups": 1,
        "tokens/generated": 15,
        "tokens/completion_mean": 2.5,
        "tokens/completion_max": 5,
        "rollout/truncated": 2,
    }
    assert metrics == pytest.approx(expected)
    assert rollout_metrics(rollout_sums(groups), longest_completion(groups)) == pytest.approx(expected)
    assert torch.tensor(list(metrics.values())).isfinite().all()


def test_groups_of_one_have_no_spread() -> None:
    metrics = rollout_metrics(rollout_sums([make_group(0, [3], [0.5])]), 3.0)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.0)
