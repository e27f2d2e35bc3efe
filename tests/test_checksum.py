"""Checksums of parts add up to that of the whole, and change with whatever changes."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from colo.engine import checksum
from colo.engine.checksum import ChecksumTable
from colo.engine.strided import Strided, row_major

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bool,
)
MODULUS = 1 << 64


def _filled(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Any bits, infinities and NaN among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (num_elements,)).bool()
    return torch.randint(0, 256, (num_elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def _flat(start: int, num_elements: int) -> Strided:
    return Strided(start, (num_elements,), (1,))


def _sum(view: Tensor, places: Strided, dtype: torch.dtype) -> int:
    return int(ChecksumTable([(view, places, dtype)]).run()[0]) % MODULUS


def _whole(tensor: Tensor) -> int:
    return _sum(tensor, Strided(0, tuple(tensor.shape), row_major(tuple(tensor.shape))), tensor.dtype)


def _odd(number: int) -> int:
    mixed = number * 0x9E3779B97F4A7C15 % MODULUS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % MODULUS
    return mixed ^ mixed >> 31 | 1


def _by_the_formula(view: Tensor, places: Strided, dtype: torch.dtype) -> int:
    """In Python's own integers, element by element."""
    size, total = dtype.itemsize, 0
    raw = bytes(view.to(dtype).contiguous().view(-1).view(torch.uint8).tolist())
    index = torch.cartesian_prod(*(torch.arange(n) for n in view.shape)).view(-1, view.dim()) if view.dim() else None
    steps = index @ torch.tensor(places.stride) if index is not None else torch.zeros(1, dtype=torch.int64)
    for number, step in enumerate(steps.tolist()):
        word, byte = divmod((places.offset + step) * size, 8)
        bits = int.from_bytes(raw[number * size : (number + 1) * size], "little") << 8 * byte
        halves = (bits & 0xFFFFFFFF) + (bits >> 32) * ((1 << 32) + checksum.HIGH)
        total += halves * _odd(word % checksum.WORDS + checksum.SALT) * _odd(word // checksum.WORDS + 1)
    return total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece_bytes", [1 << 19, 1 << 12, 300])
def test_the_sum_is_the_formula_for_any_strides_and_alignment(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "PIECE_BYTES", piece_bytes)
    torch.manual_seed(0)
    base = _filled(6000, dtype)
    table = base[8:5408].view(60, 90)
    block = checksum.WORDS * 8 // dtype.itemsize
    rows = [
        (table, Strided(5, (60, 90), (90, 1)), dtype),
        (table[3:50, 7:20], Strided(1, (47, 13), (200, 1)), dtype),
        (table.t(), Strided(block, (90, 60), (60, 1)), dtype),
        (table, Strided(3, (60, 90), (1, 60)), dtype),
        (table.unflatten(1, (9, 10)).transpose(0, 1), Strided(10, (9, 60, 10), (10, 91, 1)), dtype),
        (base[1:1025], _flat(2 * block, 1024), dtype),
        (base[:4096], _flat(8 * block + 4, 4096), dtype),
        (base[3], Strided(77, (), ()), dtype),
        (table[:0], Strided(0, (0, 90), (90, 1)), dtype),
    ]
    sums = ChecksumTable(rows).run()
    assert sums.dtype == torch.int64
    assert [value % MODULUS for value in sums.tolist()] == [_by_the_formula(*row) for row in rows]
    assert sums[-1] == 0


@pytest.mark.parametrize("engine", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_a_source_is_summed_as_the_engine_would_hold_it(engine: torch.dtype) -> None:
    torch.manual_seed(0)
    source = torch.randn(70, 130)
    places = Strided(11, (70, 130), (130, 1))
    assert _sum(source, places, engine) == _sum(source.to(engine), places, engine)
    assert _sum(source.t(), Strided(11, (130, 70), (1, 130)), engine) == _sum(source, places, engine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_any_split_add_up(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    tensor = _filled(300 * 77, dtype).view(300, 77)
    flat = tensor.view(-1)
    for _ in range(5):
        cuts = sorted([0, *(rng.randrange(flat.numel()) for _ in range(8)), flat.numel()])
        moved = [torch.cat([flat[:3], flat[a:b]])[3:] for a, b in pairwise(cuts)]
        rows = [(part, _flat(a, len(part)), dtype) for a, part in zip(cuts, moved, strict=False)]
        assert int(ChecksumTable(rows).run().sum()) % MODULUS == _whole(tensor)
        column, row = rng.randrange(1, 77), rng.randrange(1, 300)
        corners = [(0, row, 0, column), (0, row, column, 77), (row, 300, 0, column), (row, 300, column, 77)]
        quarters = [(tensor[a:b, c:d], Strided(a * 77 + c, (b - a, d - c), (77, 1)), dtype) for a, b, c, d in corners]
        assert int(ChecksumTable(quarters).run().sum()) % MODULUS == _whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_one_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = _filled(4099, dtype)
    table = ChecksumTable([(tensor, _flat(0, 4099), dtype)])
    before, raw = table.run(), tensor.view(torch.uint8)
    seen = {int(before)}
    for byte in [*range(16), 4095, 4096, len(raw) - 1]:
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(int(table.run()))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 19 * 8
    assert table.run() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_moves_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(64, 512).to(dtype)
    zeros = torch.zeros_like(tensor)
    rows, columns = torch.arange(64), torch.arange(512)
    changed = {
        "rows swapped": tensor[torch.where(rows < 2, 1 - rows, rows)],
        "columns swapped": tensor[:, torch.where(columns < 2, 1 - columns, columns)],
        "halves swapped": tensor.roll(32, 0),
        "shifted by one": tensor.view(-1).roll(1).view(64, 512),
        "shifted by a word": tensor.view(-1).roll(8 // dtype.itemsize).view(64, 512),
        "shifted by a block": tensor.view(-1).roll(4096 // dtype.itemsize).view(64, 512),
        "transposed blocks": tensor.view(2, 32, 512).transpose(0, 1).reshape(64, 512),
        "one row zero": torch.cat([tensor[:-1], zeros[:1]]),
        "all zero": zeros,
        "negative zero": -zeros,
        "all negative": -tensor,
    }
    sums = {what: _whole(value) for what, value in changed.items()}
    sums["as it was"] = _whole(tensor)
    assert len(set(sums.values())) == len(sums), sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_two_sign_flips_do_not_cancel(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    tensor = torch.randn(20_000).to(dtype)
    table = ChecksumTable([(tensor, _flat(0, 20_000), dtype)])
    before = int(table.run())
    seen = set()
    for _ in range(200):
        pair = rng.sample(range(20_000), 2)
        tensor[pair] *= -1
        seen.add(int(table.run()))
        tensor[pair] *= -1
    assert before not in seen
    assert len(seen) == 200


def test_a_table_outlives_the_storages_moving() -> None:
    tensor = torch.arange(10_000.0)
    table = ChecksumTable([(tensor, _flat(0, 10_000), torch.float32), (tensor[5:], _flat(5, 9_995), torch.bfloat16)])
    before = table.run()
    tensor.untyped_storage().resize_(0)
    keep = torch.empty(10_000)  # takes the place that was freed
    tensor.untyped_storage().resize_(40_000)
    tensor.copy_(torch.arange(10_000.0))
    assert torch.equal(table.run(), before)
    del keep


def test_no_rows_have_no_sums() -> None:
    assert ChecksumTable([]).run().tolist() == []
