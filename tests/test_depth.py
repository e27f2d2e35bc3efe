"""Which depth of sleep `auto` takes: by values, and by what must hold whatever they are."""

import itertools

import pytest
import torch

from colo.engine.depth import (
    GIB,
    SHALLOW_FIRST,
    AutoDepth,
    LargestUpdate,
    Room,
    UpdatePeak,
    capacity_bytes,
    explained,
    shallowest,
)
from colo.ranks import Ranks
from tests.ranks import run_ranks

WEIGHTS, KV = 4 * GIB, 10 * GIB


def _peak(
    *,
    used: int = 40,
    mapped: int = 0,
    activations: int = 20,
    gradients: int = 0,
    num_tokens: int = 8000,
    num_micro_batches: int = 4,
    capacity: int = 80,
) -> UpdatePeak:
    return UpdatePeak(
        used=used * GIB,
        capacity=capacity * GIB,
        mapped=mapped * GIB,
        activations=activations * GIB,
        gradients=gradients * GIB,
        num_tokens=num_tokens,
        num_micro_batches=num_micro_batches,
    )


@pytest.mark.parametrize(
    ("left", "depth"), [(14, "none"), (13.9, "kv"), (4, "kv"), (3.9, "2"), (0, "2"), (-5, "2"), (100, "none")]
)
def test_the_shallowest_depth_that_leaves_room_is_taken(left: float, depth: str) -> None:
    assert shallowest(Room(left=int(left * GIB), weights=WEIGHTS, kv_cache=KV)) == depth


def test_more_room_never_means_a_deeper_sleep() -> None:
    for weights, kv_cache in itertools.product((0, 3, 50), repeat=2):
        depths = [shallowest(Room(left=left, weights=weights, kv_cache=kv_cache)) for left in range(-10, 120)]
        places = [SHALLOW_FIRST.index(depth) for depth in depths]
        assert places == sorted(places, reverse=True)


def test_what_the_engine_had_mapped_is_no_part_of_the_update() -> None:
    deep, shallow = LargestUpdate(2 * GIB), LargestUpdate(2 * GIB)
    deep.add(_peak(used=40))
    shallow.add(_peak(used=54, mapped=14))
    assert deep.left() == shallow.left() == (80 - 2 - 40) * GIB


def test_a_larger_micro_batch_takes_more_activations_in_proportion() -> None:
    largest = LargestUpdate(0)
    largest.add(_peak(used=40, activations=20, num_tokens=8000))
    assert largest.left(4000) == largest.left() == 40 * GIB  # what was seen may come again
    assert largest.left(16000) == 20 * GIB


def test_the_largest_update_counts_and_not_the_last() -> None:
    largest = LargestUpdate(0)
    largest.add(_peak(used=60, activations=30))
    largest.add(_peak(used=40, activations=10))
    assert largest.left() == 20 * GIB


def test_a_step_of_one_micro_batch_leaves_room_for_the_gradients_of_one_with_more() -> None:
    one, more = LargestUpdate(0), LargestUpdate(0)
    # Held 30, activations 20, gradients 10: with one micro-batch the peak is 50, and the ledger takes 10 of the 20 for
    # gradients; with two they lie under the second's activations.
    one.add(_peak(used=50, activations=10, gradients=10, num_micro_batches=1))
    more.add(_peak(used=60, activations=20, gradients=10, num_micro_batches=2))
    assert one.left() == more.left() == 20 * GIB
    assert one.left(16000) == more.left(16000) == 0


def test_a_small_micro_batch_says_nothing_about_a_large_one() -> None:
    largest, ordinary = LargestUpdate(0), LargestUpdate(0)
    for seen in (largest, ordinary):
        seen.add(_peak(used=40, activations=20, num_tokens=32000))
    for num_tokens in (0, 300, 4000):
        largest.add(_peak(used=25, activations=5, num_tokens=num_tokens))
    assert largest.left() == ordinary.left()
    assert largest.left(64000) == ordinary.left(64000)


def _untrained(ranks: Ranks) -> list[str]:
    """Updates in which no rank trained, then ordinary ones, of which one leaves the second rank out."""
    auto, taken = AutoDepth(ranks, GIB), []
    for num_tokens in (0, 0, 0, 8000, 0 if ranks.rank else 8000):
        auto.add(_peak(num_tokens=num_tokens, used=20 if num_tokens else 10), WEIGHTS, KV)
        taken.append(auto.depth)
    return taken


def test_an_update_in_which_nothing_trained_is_none_of_the_first_two() -> None:
    for taken in run_ranks(_untrained, world_size=2):
        assert taken == ["2", "2", "2", "2", "none"]


def _choices(ranks: Ranks) -> list[str]:
    """One rank has more room than the other; then both see a larger update, and at last a much larger micro-batch."""
    auto = AutoDepth(ranks, GIB)
    mine = 10 * ranks.rank
    taken = [auto.depth]
    for used in (40, 40, 40, 70):
        auto.add(_peak(used=used + mine), WEIGHTS, KV)
        taken.append(auto.depth)
        taken.append(auto.for_update(8000, WEIGHTS, KV))
    auto = AutoDepth(ranks, GIB)
    for _ in range(2):
        auto.add(_peak(used=40), WEIGHTS, KV)
    num_tokens = 16000 if ranks.rank else 100  # one rank has the large one
    return [*taken, auto.depth, auto.for_update(num_tokens, WEIGHTS, KV), auto.for_update(80000, WEIGHTS, KV)]


def test_every_rank_takes_the_depth_of_the_one_with_least_room() -> None:
    saw = run_ranks(_choices, world_size=2)
    # 80 - 1 - 50 = 29 GiB hold both; after the last update, of 80 on one rank, nothing is left.
    assert saw[0] == ["2", "2", "2", "none", "none", "none", "none", "2", "2", "none", "none", "2"]
    assert saw[1] == saw[0]


def test_the_line_that_explains_has_the_numbers() -> None:
    room = Room(left=int(12.5 * GIB), weights=WEIGHTS, kv_cache=KV)
    assert explained("kv", room) == (
        "engine.sleep=auto takes depth kv: beside the largest update and the margin there are 12.50 GiB, the engine's "
        "weights take 4.00 and its KV cache 10.00"
    )


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = capacity_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert capacity_bytes(torch.device("cpu")) == alone // 4
    assert alone > GIB
