import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from colo.engine.strided import Box, Strided, boxes_within, row_major, runs_of, through

NUM_TRIALS = 400


def made_up_views(seed: int) -> Iterator[tuple[random.Random, Tensor, Tensor]]:
    """(generator, a whole tensor that holds its own places, a view of it such as a loader takes)."""
    draw = random.Random(seed)
    for _ in range(NUM_TRIALS):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        whole = torch.arange(math.prod(shape)).view(shape)
        view = whole
        if draw.random() < 0.15:
            view = view.reshape(-1)
        for dim in range(view.dim()):
            first = draw.randint(0, view.shape[dim] - 1)
            view = view.narrow(dim, first, draw.randint(1, view.shape[dim] - first))
        if draw.random() < 0.3:
            view = view.permute(*draw.sample(range(view.dim()), view.dim()))
        if draw.random() < 0.3:
            view = view.select(dim := draw.randrange(view.dim()), draw.randrange(view.shape[dim]))
        if draw.random() < 0.1:
            view = view[..., None].expand(*view.shape, 3)
        yield draw, whole, view


def places_of(view: Tensor) -> Strided:
    return Strided(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def indices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(box.starts, box.lengths, strict=True))


def laid_out_otherwise(whole: Tensor, draw: random.Random) -> Tensor:
    """The same values with its dimensions in another order in memory, and room behind each."""
    order = draw.sample(range(whole.dim()), whole.dim())
    memory = torch.zeros([whole.shape[dim] + 1 for dim in order], dtype=whole.dtype)
    made = memory.permute(*[order.index(dim) for dim in range(whole.dim())])
    for dim in range(whole.dim()):
        made = made.narrow(dim, 0, whole.shape[dim])
    return made.copy_(whole)


def test_boxes_cover_each_place_within_the_limits_once_and_no_other() -> None:
    for draw, whole, view in made_up_views(seed=0):
        places = places_of(view)
        low = draw.randint(0, whole.numel())
        high = draw.randint(low, whole.numel())
        seen = torch.zeros(view.shape, dtype=torch.int)
        for box in boxes_within(places, low, high):
            part = places.narrow(box).view_of(whole)
            assert torch.equal(part, view[indices(box)])
            seen[indices(box)] += 1
        assert torch.equal(seen, ((view >= low) & (view < high)).int()), (places, low, high)


def test_shards_of_any_size_cut_a_view_without_loss() -> None:
    for draw, whole, view in made_up_views(seed=1):
        cuts = sorted([0, whole.numel(), *(draw.randint(0, whole.numel()) for _ in range(2))])
        built = torch.full(view.shape, -1)
        for low, high in pairwise(cuts):
            for box in boxes_within(places_of(view), low, high):
                read = places_of(view).narrow(box)
                shard = whole.reshape(-1)[low:high].clone()
                built[indices(box)] = Strided(read.offset - low, read.shape, read.stride).view_of(shard)
        assert torch.equal(built, view)


def test_rows_that_no_limit_cuts_are_one_box() -> None:
    places = Strided(0, (1000, 64), (64, 1))
    assert list(boxes_within(places, 64, 64 * 900)) == [Box((1, 0), (899, 64))]
    boxes = list(boxes_within(places, 70, 64 * 900 + 3))
    assert sorted(boxes, key=lambda box: box.starts) == [
        Box((1, 6), (1, 58)),
        Box((2, 0), (898, 64)),
        Box((900, 0), (1, 3)),
    ]
    assert list(boxes_within(Strided(5, (), ()), 5, 6)) == [Box((), ())]
    assert list(boxes_within(Strided(0, (0, 4), (4, 1)), 0, 9)) == []


def test_a_view_is_found_in_a_source_that_is_not_contiguous() -> None:
    for draw, whole, view in made_up_views(seed=2):
        source = laid_out_otherwise(whole, draw)
        found = torch.full(view.shape, -1)
        for box, places in through(places_of(view), tuple(whole.shape), tuple(source.stride())):
            assert (found[indices(box)] == -1).all()
            found[indices(box)] = places.view_of(source)
        assert torch.equal(found, view)


@pytest.mark.parametrize(("step", "size"), [(7, 3), (4, 6), (5, 4), (11, 2)])
def test_steps_that_are_no_whole_number_of_rows_are_followed_one_by_one(step: int, size: int) -> None:
    whole = torch.arange(24).view(4, 6)
    source = whole.t().contiguous().t()
    view = whole.reshape(-1)[::step][:size]
    found = torch.full((size,), -1)
    for box, places in through(places_of(view), (4, 6), tuple(source.stride())):
        found[indices(box)] = places.view_of(source)
    assert torch.equal(found, view)


def test_runs_are_the_places_of_a_view_as_long_as_they_are_neighbours() -> None:
    for _, _, view in made_up_views(seed=3):
        starts, length = runs_of(places_of(view))
        found = (torch.from_numpy(starts)[:, None] + torch.arange(length)).reshape(-1)
        assert torch.equal(found.sort().values, view.reshape(-1).sort().values)
    starts, length = runs_of(Strided(3, (4, 5, 6), row_major((4, 5, 6))))
    assert (starts.tolist(), length) == ([3], 120)
    starts, length = runs_of(Strided(0, (2, 3), (10, 1)))
    assert (starts.tolist(), length) == ([0, 10], 3)
