"""The clipped loss and its denominators, worked by hand."""

import math

import pytest
import torch
from torch import Tensor

from colo import config
from colo.config import LossConfig
from colo.rl.losses import ALGORITHMS, clipped_loss, denominator
from colo.types import MicroBatch


def one_token_rows(old: list[float], engine: list[float], advantages: list[float]) -> tuple[Tensor, MicroBatch]:
    """Old logprobs [B, 2] and a micro-batch whose second column trains; the first holds what must not be read."""
    old_BT = torch.stack([torch.full((len(old),), math.nan), torch.tensor(old)], dim=1)
    engine_BT = torch.stack([torch.full((len(old),), math.nan), torch.tensor(engine)], dim=1)
    mask_BT = torch.tensor([[False, True]]).expand(len(old), 2)
    batch = MicroBatch(
        token_ids_BT=torch.ones(len(old), 2, dtype=torch.int64),
        loss_mask_BT=mask_BT,
        engine_logprobs_BT=engine_BT,
        ages_BT=torch.zeros(len(old), 2, dtype=torch.int32),
        advantages_B=torch.tensor(advantages),
    )
    return old_BT, batch


def policy_logprobs(values: list[float]) -> Tensor:
    """[B, 2] with NaN where nothing trains."""
    return torch.stack([torch.full((len(values),), math.nan), torch.tensor(values)], dim=1).requires_grad_()


def test_ratio_clip_and_gradient_worked_by_hand() -> None:
    # the clip at 1.28 and 0.8 bites in the first two and the last three
    old, ratios = [-1.0] * 7, [1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 0.5]
    advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0]
    old_BT, batch = one_token_rows(old, old, advantages)
    policy_BT = policy_logprobs([-1.0 + math.log(ratio) for ratio in ratios])
    total, sums = clipped_loss(policy_BT, old_BT, batch, LossConfig(clip_low=0.2, clip_high=0.28), None)
    assert total.item() == pytest.approx(2 * -1.28 + 1.5 - 0.5 + 3 * 0.8)
    total.backward()
    assert policy_BT.grad is not None
    expected = torch.tensor([0.0, 0.0, 1.5, -0.5, 0.0, 0.0, 0.0])  # -A * ratio, or 0 where clipped
    torch.testing.assert_close(policy_BT.grad[:, 1], expected)
    assert {name: value.item() for name, value in sums.items()} == {
        "num_clipped_low": 3,
        "num_clipped_high": 2,
        "num_capped": 0,
    }


@pytest.mark.parametrize(
    ("loss", "weights", "num"),
    [
        (LossConfig(correction_high=2.0), [2.0, 1.5, 0.25], {"num_capped": 1}),
        (LossConfig(correction="off"), [1.0, 1.0, 1.0], {}),
        (
            LossConfig(correction="token_mask", correction_low=0.5, correction_high=5.0),
            [4.0, 1.5, 0.0],
            {"num_masked": 1, "num_masked_sequences": 1},
        ),
    ],
)
def test_the_correction_weighs_the_gradient_and_carries_none(
    loss: LossConfig, weights: list[float], num: dict[str, int]
) -> None:
    # old / engine probability: 4, 1.5, 0.25; the policy is the old one, so the gradient is -w * A
    old_BT, batch = one_token_rows([-1.0] * 3, [-1.0 - math.log(w) for w in (4.0, 1.5, 0.25)], [1.0, 1.0, -2.0])
    policy_BT = policy_logprobs([-1.0] * 3)
    total, sums = clipped_loss(policy_BT, old_BT, batch, loss, None)
    total.backward()
    assert policy_BT.grad is not None
    expected = [-weights[0], -weights[1], 2.0 * weights[2]]
    torch.testing.assert_close(policy_BT.grad[:, 1], torch.tensor(expected))
    assert total.item() == pytest.approx(sum(expected))
    assert {name: value.item() for name, value in sums.items() if not name.startswith("num_clipped")} == num


def test_a_masked_token_keeps_its_kl_penalty() -> None:
    old_BT, batch = one_token_rows([-1.0], [-9.0], [1.0])  # ratio exp(8)
    loss = LossConfig(correction="token_mask", correction_high=2.0, kl_coef=0.1)
    policy_BT = policy_logprobs([-1.0])
    total, _ = clipped_loss(policy_BT, old_BT, batch, loss, torch.tensor([[math.nan, -0.5]]))
    assert total.item() == pytest.approx(0.1 * (math.exp(0.5) - 1.5))


def test_kl_to_the_reference_is_k3() -> None:
    old_BT, batch = one_token_rows([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0])
    policy_BT = policy_logprobs([-1.0, -2.0])
    reference_BT = torch.tensor([[math.nan, -0.5], [math.nan, -2.0]])  # reference - policy: 0.5, 0
    total, sums = clipped_loss(policy_BT, old_BT, batch, LossConfig(kl_coef=0.1), reference_BT)
    total.backward()
    kl = math.exp(0.5) - 1 - 0.5
    assert sums["kl_sum"].item() == pytest.approx(kl)
    assert total.item() == pytest.approx(0.1 * kl)
    assert policy_BT.grad is not None
    assert policy_BT.grad[0, 1].item() == pytest.approx(0.1 * (1 - math.exp(0.5)))
    assert policy_BT.grad[1, 1].item() == 0
    with pytest.raises(AssertionError, match="needs reference logprobs"):
        clipped_loss(policy_BT, old_BT, batch, LossConfig(kl_coef=0.1), None)


@pytest.mark.parametrize("correction", config.CORRECTIONS)
def test_nothing_off_the_mask_reaches_loss_or_gradient(correction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.rand(3, 6, generator=generator) < 0.5
    values = torch.randn(4, 3, 6, generator=generator)
    advantages_B = torch.tensor([1.0, -0.5, 0.3])

    def run(filler: float) -> tuple[Tensor, Tensor]:
        policy_BT, old_BT, engine_BT, reference_BT = (torch.where(mask_BT, value, filler) for value in values)
        policy_BT.requires_grad_()
        batch = MicroBatch(
            token_ids_BT=torch.zeros(3, 6, dtype=torch.int64),
            loss_mask_BT=mask_BT,
            engine_logprobs_BT=engine_BT,
            ages_BT=torch.zeros(3, 6, dtype=torch.int32),
            advantages_B=advantages_B,
        )
        total, _ = clipped_loss(policy_BT, old_BT, batch, LossConfig(correction=correction, kl_coef=0.1), reference_BT)
        total.backward()
        assert policy_BT.grad is not None
        return total.detach(), policy_BT.grad

    clean, clean_gradient_BT = run(0.0)
    assert clean_gradient_BT[~mask_BT].abs().max() == 0
    for filler in (math.nan, math.inf, -math.inf):
        total, gradient_BT = run(filler)
        assert torch.equal(total, clean)
        assert torch.equal(gradient_BT, clean_gradient_BT)


@pytest.mark.parametrize("correction", config.CORRECTIONS)
def test_a_sum_over_micro_batches_is_the_sum_over_all(correction: str) -> None:
    loss = LossConfig(correction=correction, correction_high=1.05)
    old_BT, batch = one_token_rows([-1.0, -2.0, -0.3], [-1.1, -1.8, -0.3], [1.0, -1.0, 0.4])
    policy_BT = policy_logprobs([-0.9, -2.4, -0.1])
    whole, _ = clipped_loss(policy_BT, old_BT, batch, loss, None)
    parts = torch.zeros(())
    for rows in (slice(0, 1), slice(1, 3)):
        part = MicroBatch(
            token_ids_BT=batch.token_ids_BT[rows],
            loss_mask_BT=batch.loss_mask_BT[rows],
            engine_logprobs_BT=batch.engine_logprobs_BT[rows],
            ages_BT=batch.ages_BT[rows],
            advantages_B=batch.advantages_B[rows],
        )
        parts = parts + clipped_loss(policy_BT[rows], old_BT[rows], part, loss, None)[0]
    torch.testing.assert_close(parts, whole)


def test_denominators_count_tokens_sequences_or_sequences_times_the_limit() -> None:
    assert denominator("tokens", 120, 7, 64) == 120
    assert denominator("sequences", 120, 7, 64) == 7
    assert denominator("sequences_x_limit", 120, 7, 64) == 448
    with pytest.raises(ValueError, match="must be one of tokens, sequences, sequences_x_limit, got 'words'"):
        denominator("words", 120, 7, 64)


def test_every_algorithm_that_a_recipe_can_name_is_there() -> None:
    assert tuple(ALGORITHMS) == config.ALGORITHMS
    assert {name: algorithm.denominator for name, algorithm in ALGORITHMS.items()} == {
        "grpo": "tokens",
        "dr_grpo": "sequences_x_limit",
        "rloo": "sequences",
    }
