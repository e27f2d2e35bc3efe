"""Copies of many views at once, and the cutting of views into runs and chunks."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from colo.engine.copy_kernel import CopyTable, common_runs, cut_runs
from colo.engine.copy_kernel import _cut_chunks as cut_chunks

SIZES = (1, 2, 4, 8)


def test_a_table_copies_with_the_cast_whatever_the_strides_and_writes_nothing_else() -> None:
    torch.manual_seed(0)
    base = torch.full((4000,), 7.0, dtype=torch.bfloat16)
    source = torch.randn(30, 40)
    counts = torch.arange(50)
    pairs = [
        (base[1:1201].view(30, 40), source),
        (base[1201:2401].view(40, 30), source.t()),
        (base[2401:3601].view(30, 40)[:, ::2], source.bfloat16()[:, ::2]),
        (base[3700:3700], source[:0, 0]),
        (torch.zeros(50, dtype=torch.int64), counts),
    ]
    table = CopyTable(pairs)
    for _ in range(2):
        table.run()
        for destination, view in pairs:
            assert torch.equal(destination, view.to(destination.dtype))
        assert (base[2402:3601:2] == 7).all()
        assert base[0] == 7
        assert (base[3601:] == 7).all()
        source.neg_()
        pairs[2][1].copy_(source[:, ::2])
    assert table.num_bytes == 2 * 1200 * (2 + 4) + 600 * (2 + 2) + 50 * 16


def test_a_table_outlives_the_storages_moving() -> None:
    destination, source = torch.zeros(1000, requires_grad=True), torch.arange(1000.0)
    table = CopyTable([(destination[10:], source[:-10])])
    keep = []
    for fill in (3.0, 4.0):
        for tensor in (destination, source):
            tensor.untyped_storage().resize_(0)
            keep.append(torch.empty(1000))  # takes the place that was freed
            tensor.untyped_storage().resize_(4000)
        with torch.no_grad():
            destination.zero_()
            source.fill_(fill)
        table.run()
        assert destination.tolist() == [0.0] * 10 + [fill] * 990


@pytest.mark.parametrize("seed", range(4))
def test_common_runs_are_what_both_sides_hold_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    full = torch.arange(7 * 6 * 8 * 4).view(7, 6, 8, 4)
    order = tuple(rng.permutation(3).tolist())

    def cut(tensor: Tensor) -> Tensor:
        return tensor[1:6, :, : 8 if seed % 2 else 5].permute(*order, 3)

    other = torch.arange(2000, 2000 + cut(full).numel()).view(cut(full).shape)
    first_a, first_b, length = common_runs(cut(full).shape, cut(full).stride(), other.stride())
    pairs = {
        (int(cut(full)[(0,) * 4]) + a + i, 2000 + b + i)
        for a, b in zip(first_a.tolist(), first_b.tolist(), strict=True)
        for i in range(length)
    }
    assert pairs == set(zip(cut(full).reshape(-1).tolist(), other.reshape(-1).tolist(), strict=True))
    assert len(first_a) * length == other.numel()
    assert length >= 4


def test_contiguous_views_are_one_run_and_a_transposed_one_falls_apart() -> None:
    first, _, length = common_runs((3, 4, 5), (20, 5, 1), (20, 5, 1))
    assert (first.tolist(), length) == ([0], 60)
    first, other, length = common_runs((3, 4), (8, 1), (4, 1))
    assert (first.tolist(), other.tolist(), length) == ([0, 8, 16], [0, 4, 8], 4)
    assert common_runs((3, 4), (1, 3), (4, 1))[2] == 1
    first, _, length = common_runs((), (), ())
    assert (first.tolist(), length) == ([0], 1)


def test_cut_runs_cover_each_run_once_in_chunks() -> None:
    rng = np.random.default_rng(0)
    lengths, firsts = rng.integers(1, 300, 500), rng.integers(1, 65, 500)
    run, start, length = cut_runs(lengths, firsts, 64)
    assert length.min() > 0
    assert length.max() <= 64
    for number in range(500):
        mine = run == number
        assert start[mine].tolist() == [0, *np.cumsum(length[mine])[:-1].tolist()]
        assert length[mine].sum() == lengths[number]
        assert length[mine][0] == min(firsts[number], lengths[number])


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_chunks_start_on_16_bytes_wherever_both_sides_can(source: int, target: int) -> None:
    rng = np.random.default_rng(1)
    runs = np.stack(
        [rng.integers(1000, 2000, 200) * source, rng.integers(1000, 2000, 200) * target, rng.integers(1, 60_000, 200)],
        1,
    )
    chunks = cut_chunks(runs, source, target)
    assert chunks[:, 2].sum() == runs[:, 2].sum()
    ends = iter(chunks)
    for source_at, target_at, count in runs.tolist():
        could = any((source_at + i * source) % 16 == 0 == (target_at + i * target) % 16 for i in range(16))
        done = 0
        while done < count:
            at_source, at_target, length = next(ends).tolist()
            assert (at_source, at_target) == (source_at + done * source, target_at + done * target)
            assert not could or done == 0 or at_source % 16 == 0 == at_target % 16
            assert done > 0 or length < 16 or not could or at_source % 16 == 0 == at_target % 16
            done += length
        assert done == count


def test_hundreds_of_thousands_of_rows_are_cut_in_no_time() -> None:
    began = time.perf_counter()
    targets, sources, length = common_runs((300_000, 64), (256, 1), (64, 1))
    runs = np.stack([sources * 2, targets * 2, np.full_like(sources, length)], axis=1)
    chunks = cut_chunks(runs, 2, 2)
    assert len(chunks) == 300_000
    assert time.perf_counter() - began < 1  # some 0.05 s on a core of its own
