"""Group advantages, worked by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from colo.rl.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages

ALL = [grpo_advantages, dr_grpo_advantages, rloo_advantages]
Advantages = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("advantages", "size"), [(grpo_advantages, 0.86588), (dr_grpo_advantages, 0.5), (rloo_advantages, 0.66667)]
)
def test_two_right_and_two_wrong_give_the_number_worked_by_hand(advantages: Advantages, size: float) -> None:
    # mean 0.5; sample variance 4 * 0.25 / 3, so std 0.57735; the others' mean is 1/3 for a 1 and 2/3 for a 0
    got_PG = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    assert got_PG.dtype == torch.float32
    torch.testing.assert_close(got_PG, torch.tensor([[size, -size, -size, size]]), atol=5e-6, rtol=0)


@pytest.mark.parametrize("advantages", ALL)
def test_equal_rewards_give_exactly_zero(advantages: Advantages) -> None:
    for reward in (0.0, 1.0, 0.1, 1e30, -7.3):
        for size in (2, 3, 7, 13):
            got_PG = advantages(torch.full((2, size), reward))
            assert torch.equal(got_PG, torch.zeros(2, size)), (reward, size)


@pytest.mark.parametrize("advantages", ALL)
def test_groups_do_not_see_each_other(advantages: Advantages) -> None:
    rewards_PG = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    rewards_PG[2] = 0.3
    alone_PG = torch.cat([advantages(row_G[None]) for row_G in rewards_PG])
    torch.testing.assert_close(advantages(rewards_PG), alone_PG)
    torch.testing.assert_close(advantages(rewards_PG).sum(dim=1), torch.zeros(5), atol=1e-5, rtol=0)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    got_PG = rloo_advantages(torch.tensor([[3.0, 1.0, -1.0]]))
    torch.testing.assert_close(got_PG, torch.tensor([[3.0 - 0.0, 1.0 - 1.0, -1.0 - 2.0]]))


@pytest.mark.parametrize("advantages", ALL)
def test_a_group_of_one_is_refused(advantages: Advantages) -> None:
    with pytest.raises(ValueError, match=r"^rollout.group_size must be at least 2, got 1$"):
        advantages(torch.tensor([[1.0]]))
