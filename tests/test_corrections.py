"""The corrections' weights, worked by hand, and what holds for all of them."""

import math

import pytest
import torch
from torch import Tensor

from colo import config
from colo.config import LossConfig
from colo.rl.corrections import CORRECTIONS, correction_weights
from colo.types import MicroBatch

LOSSES = {
    "off": LossConfig(correction="off"),
    "token_truncate": LossConfig(correction="token_truncate", correction_high=2.0),
    "token_mask": LossConfig(correction="token_mask", correction_low=0.5, correction_high=2.0),
    "sequence_truncate": LossConfig(correction="sequence_truncate", correction_high=2.0),
    "sequence_mask": LossConfig(correction="sequence_mask", correction_low=0.5, correction_high=2.0),
    "geometric_mask": LossConfig(correction="geometric_mask", correction_low=0.8, correction_high=1.25),
}
RATIOS = [[4.0, 0.5, 0.75], [3.0, 1.0, 1.5], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]
"""Products 1.5, 4.5, 0.25 and 1; geometric means 1.1447, 1.6510, 0.6300 and 1."""


def rows(ratios: list[list[float]]) -> tuple[Tensor, MicroBatch]:
    """Old logprobs and a micro-batch of rows whose loss tokens, from the second on, have these probability ratios."""
    longest = 1 + max(map(len, ratios))
    old_BT = torch.full((len(ratios), longest), math.nan)
    engine_BT, mask_BT = old_BT.clone(), torch.zeros_like(old_BT, dtype=torch.bool)
    for index, row in enumerate(ratios):
        end = 1 + len(row)
        mask_BT[index, 1:end] = True
        engine_BT[index, 1:end] = -2.0
        old_BT[index, 1:end] = torch.tensor(row).log() - 2.0
    batch = MicroBatch(
        token_ids_BT=torch.ones_like(mask_BT, dtype=torch.int64),
        loss_mask_BT=mask_BT,
        engine_logprobs_BT=engine_BT,
        ages_BT=torch.zeros_like(mask_BT, dtype=torch.int32),
        advantages_B=torch.ones(len(ratios)),
    )
    return old_BT, batch


def weights(name: str, ratios: list[list[float]]) -> tuple[list[list[float]], dict[str, float]]:
    """Weights of the loss tokens, and the sums."""
    old_BT, batch = rows(ratios)
    weights_BT, sums = correction_weights(old_BT.requires_grad_(), batch, LOSSES[name])
    assert weights_BT.dtype == torch.float32
    assert not weights_BT.requires_grad
    assert (weights_BT[~batch.loss_mask_BT] == 1).all()
    found = [weights_BT[index][batch.loss_mask_BT[index]].tolist() for index in range(len(ratios))]
    return found, {key: value.item() for key, value in sums.items()}


@pytest.mark.parametrize(
    ("name", "expected", "expected_sums"),
    [
        ("off", [[1, 1, 1]] * 4, {}),
        ("token_truncate", [[2, 0.5, 0.75], [2, 1, 1.5], [0.25, 1, 1], [1, 1, 1]], {"num_capped": 2}),
        (
            "token_mask",
            [[0, 0.5, 0.75], [0, 1, 1.5], [0, 1, 1], [1, 1, 1]],
            {"num_masked": 3, "num_masked_sequences": 0},
        ),
        ("sequence_truncate", [[1.5] * 3, [2] * 3, [0.25] * 3, [1] * 3], {"num_capped": 3}),
        ("sequence_mask", [[1.5] * 3, [0] * 3, [0] * 3, [1] * 3], {"num_masked": 6, "num_masked_sequences": 2}),
        ("geometric_mask", [[1] * 3, [0] * 3, [0] * 3, [1] * 3], {"num_masked": 6, "num_masked_sequences": 2}),
    ],
)
def test_weights_worked_by_hand(name: str, expected: list[list[float]], expected_sums: dict[str, float]) -> None:
    found, sums = weights(name, RATIOS)
    for row, by_hand in zip(found, expected, strict=True):
        assert row == pytest.approx(by_hand, rel=1e-5)
    assert sums == expected_sums


def test_a_completion_whose_every_token_is_masked_is_counted() -> None:
    assert weights("token_mask", [[9.0, 0.1], [9.0, 1.0]])[1] == {"num_masked": 3, "num_masked_sequences": 1}


def test_the_geometric_mean_does_not_grow_with_the_length_as_the_product_does() -> None:
    found, _ = weights("geometric_mask", [[1.1] * 2, [1.1] * 50])
    assert found == [[1.0] * 2, [1.0] * 50]
    found, _ = weights("sequence_mask", [[1.1] * 2, [1.1] * 50])
    assert found[0] == pytest.approx([1.21] * 2, rel=1e-5)
    assert found[1] == [0.0] * 50


@pytest.mark.parametrize("name", config.CORRECTIONS)
def test_without_a_mismatch_every_weight_is_one(name: str) -> None:
    found, sums = weights(name, [[1.0], [1.0] * 7])
    assert found == [[1.0], [1.0] * 7]
    assert set(sums.values()) <= {0}
    tight = LossConfig(correction=name, correction_low=0.999 if name in config.MASKING else 0.0, correction_high=1.0)
    old_BT, batch = rows([[1.0], [1.0] * 7])
    assert (correction_weights(old_BT, batch, tight)[0] == 1).all()


@pytest.mark.parametrize("name", config.CORRECTIONS)
def test_other_rows_and_their_padding_change_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = [(0.4 * torch.randn(length, generator=generator)).exp().tolist() for length in (1, 5, 12, 3)]
    whole, sums = weights(name, ratios)
    alone = [weights(name, [row]) for row in ratios]
    assert whole == [found for ((found,), _) in alone]
    assert sums == {key: sum(row_sums[key] for _, row_sums in alone) for key in sums}


@pytest.mark.parametrize("name", config.CORRECTIONS)
def test_a_row_without_loss_tokens_counts_nowhere(name: str) -> None:
    _, sums = weights(name, [[], [1.0]])
    assert set(sums.values()) <= {0}


@pytest.mark.parametrize("name", [name for name in config.CORRECTIONS if name != "off"])
def test_ratios_beyond_what_a_float_holds_meet_the_limit_and_nan_is_not_masked_away(name: str) -> None:
    old_BT, batch = rows([[1.0, 1.0]])
    old_BT[0, 1:] = 500.0
    weights_BT, sums = correction_weights(old_BT, batch, LOSSES[name])
    limit = 0.0 if name in config.MASKING else 2.0
    assert weights_BT[0, 1:].tolist() == [limit, limit]
    assert sums["num_masked" if name in config.MASKING else "num_capped"].item() == 2
    old_BT[0, 1:] = math.nan
    weights_BT, _ = correction_weights(old_BT, batch, LOSSES[name])
    assert name == "geometric_mask" or weights_BT[0, 1:].isnan().all()
    assert (weights_BT[0, 1:] != 0).all()


def test_every_correction_that_a_recipe_can_name_is_there() -> None:
    assert set(CORRECTIONS) == set(config.CORRECTIONS) == set(LOSSES)
