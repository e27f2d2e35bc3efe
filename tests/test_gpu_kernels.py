"""The CUDA kernels against PyTorch's copy and the checksum of the CPU, bit for bit."""

import random

import pytest
import torch
from torch import Tensor

from colo.engine.checksum import ChecksumTable, Row
from colo.engine.copy_kernel import CopyTable
from colo.engine.strided import Strided

pytestmark = pytest.mark.gpu(1)
DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SAME = [(dtype, dtype) for dtype in (BF16, F32, torch.float64, torch.uint8, torch.int64, torch.float8_e4m3fn)]
CASTS = [(F32, BF16), (BF16, F32), (F32, F16), (F16, BF16), (torch.float64, BF16), (F32, torch.float8_e4m3fn)]


def _filled(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Any bits of integers; floats of every size, with zeros, infinities and ties of the rounding among them."""
    if not dtype.is_floating_point:
        return torch.randint(0, 120, (num_elements,), device=DEVICE).to(dtype)
    values = torch.randn(num_elements, device=DEVICE) * 10.0 ** torch.randint(-3, 3, (num_elements,), device=DEVICE)
    special = torch.tensor([0.0, -0.0, float("inf"), 1.00390625, 1.01171875, 1e-40], device=DEVICE)
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-400, 400).to(dtype)
    values[torch.randperm(num_elements, device=DEVICE)[: len(special)]] = special[:num_elements]
    return values.to(dtype)


def _views(dtype: torch.dtype, rng: random.Random) -> list[Tensor]:
    """Contiguous ones and column slices at places that are no multiple of anything, and what no kernel likes."""
    views = []
    for num_elements in (1, 7, 15, 16, 17, 1000, 4096, 70_001):
        start = rng.randrange(9)
        views.append(_filled(num_elements + start, dtype)[start:])
    for rows, columns, width in ((3, 5, 9), (40, 128, 256), (33, 250, 1027), (5, 3000, 3000), (200, 3, 11)):
        start = rng.randrange(width - columns + 1)
        views.append(_filled(rows * width, dtype).view(rows, width)[:, start : start + columns])
    views.append(_filled(12 * 16 * 64, dtype).view(12, 16, 64).transpose(0, 1))
    views.append(_filled(60 * 50, dtype).view(60, 50).t())
    views.append(_filled(10, dtype)[:0])
    return views


def _laid_out_elsewhere(view: Tensor, dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A place for a copy, with other strides and another alignment."""
    width = (view.shape[-1] if view.dim() else 1) + rng.randrange(5)
    start = rng.randrange(8)
    rows = view.numel() // view.shape[-1] if view.numel() else 0
    base = torch.zeros(start + rows * width, device=DEVICE).to(dtype)
    target = base[start:].view(rows, width)[:, : view.shape[-1]]
    return target.unflatten(0, view.shape[:-1]) if view.dim() > 2 else target.view(view.shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(("source", "target"), SAME + CASTS, ids=str)
def test_a_copy_table_writes_the_bits_of_copy(source: torch.dtype, target: torch.dtype) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    pairs = [(_laid_out_elsewhere(view, target, rng), view) for view in _views(source, rng)]
    table = CopyTable(pairs)
    for _ in range(2):
        for destination, _ in pairs:
            destination.zero_()
        table.run()
        for destination, view in pairs:
            wanted = torch.zeros_like(destination).copy_(view)
            assert torch.equal(_bits(destination), _bits(wanted)), f"{tuple(view.shape)}, strides {view.stride()}"


def test_one_table_copies_all_pairs_of_dtypes_and_leaves_the_rest_alone() -> None:
    rng = random.Random(2)
    pairs, bases = [], []
    for source, target in SAME + CASTS:
        base = torch.zeros(3000, device=DEVICE).to(target)
        bases.append(base)
        pairs.append((base[100 + rng.randrange(8) : -100 - rng.randrange(8)], _filled(3000, source)))
    pairs = [(destination, view[: len(destination)]) for destination, view in pairs]
    pairs.append((torch.zeros(3000, device=DEVICE), torch.randn(3000)))
    table = CopyTable(pairs)
    table.run()
    for destination, view in pairs:
        wanted = torch.zeros_like(destination).copy_(view)
        assert torch.equal(_bits(destination), _bits(wanted))
    for base in bases:
        assert not _bits(base[:100]).any()
        assert not _bits(base[-100:]).any()
    sizes = [(view.numel(), view.element_size() + destination.element_size()) for destination, view in pairs]
    assert table.num_bytes == sum(number * size for number, size in sizes)


def _places(view: Tensor, rng: random.Random) -> Strided:
    shape = tuple(view.shape)
    if len(shape) == 1:
        return Strided(rng.randrange(3000), shape, (1,))
    inner = shape[-1] + rng.choice((0, 3, 512))
    strides = [inner, 1] if len(shape) == 2 else [inner * shape[1], inner, 1]
    return Strided(rng.choice((0, 2048, rng.randrange(3000))), shape, tuple(strides))


@pytest.mark.parametrize(("source", "engine"), SAME + CASTS, ids=str)
def test_checksums_are_those_of_the_cpu(source: torch.dtype, engine: torch.dtype) -> None:
    rng = random.Random(3)
    torch.manual_seed(3)
    rows: list[Row] = [(view, _places(view, rng), engine) for view in _views(source, rng)]
    rows += [(view, Strided(2048 * 3, (70_001,), (1,)), engine) for view in (_filled(70_001, source),)]
    sums = ChecksumTable(rows).run()
    assert sums.device.type == DEVICE
    assert sums.tolist() == ChecksumTable([(view.cpu(), places, dtype) for view, places, dtype in rows]).run().tolist()


def test_both_sides_of_a_reload_have_one_checksum() -> None:
    engine = torch.zeros(3 * 1000, 513, device=DEVICE, dtype=BF16)
    sources = [_filled(1000 * 513, F32).view(1000, 513) for _ in range(3)]
    parts = [engine[at * 1000 : (at + 1) * 1000] for at in range(3)]
    CopyTable(list(zip(parts, sources, strict=True))).run()
    whole = ChecksumTable([(engine, Strided(0, (3000, 513), (513, 1)), BF16)])
    rows = [(source, Strided(at * 1000 * 513, (1000, 513), (513, 1)), BF16) for at, source in enumerate(sources)]
    assert ChecksumTable(rows).run().sum() == whole.run()[0]
    engine[1234, 17] *= 2
    assert ChecksumTable(rows).run().sum() != whole.run()[0]
