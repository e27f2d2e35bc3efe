"""The kernels that move and sum the slices of a reload on CUDA; the CPU install has no working Triton."""

# pyright: reportArgumentType=false
# A constexpr is its value inside a kernel, which the type checker cannot know.

import torch
import triton
import triton.language as tl

BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
"""What an element of so many bytes is loaded as where its value does not matter."""
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""What is cast in a kernel, with the rounding of PyTorch."""


@triton.jit
def copy_chunks(table: tl.tensor, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one contiguous chunk a program: rows of `table` are source and target address, and number of elements."""
    row = table + tl.program_id(0) * 3
    source, target, count = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    if (source | target) % 16 == 0:
        # The compiler takes 16 bytes at a time only by this hint, which must be on the pointer: one on the number is
        # lost in the cast.
        sources = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), 16)
        targets = tl.multiple_of(target.to(tl.pointer_type(TARGET)), 16)
        body = (count >> 4) << 4
        for start in range(0, body, BLOCK):
            places = start + tl.arange(0, BLOCK)
            values = tl.load(sources + places, mask=places < body)
            tl.store(targets + places, values.to(TARGET), mask=places < body)
        rest = body + tl.arange(0, 16)
        tl.store(targets + rest, tl.load(sources + rest, mask=rest < count).to(TARGET), mask=rest < count)
    else:
        sources = source.to(tl.pointer_type(SOURCE))
        targets = target.to(tl.pointer_type(TARGET))
        for start in range(0, count, BLOCK):
            places = start + tl.arange(0, BLOCK)
            values = tl.load(sources + places, mask=places < count)
            tl.store(targets + places, values.to(TARGET), mask=places < count)


@triton.jit
def odd_mix(number: tl.tensor):
    """The finalizer of splitmix64, made odd; `odd_numbers` in checksum.py is the same."""
    mixed = number * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit
def bits_of(values: tl.tensor, SAME: tl.constexpr, ENGINE: tl.constexpr, RAW: tl.constexpr, HIGH: tl.constexpr):
    """The bits of each element after the cast, in 64; of a whole word, its two halves weighted and added up."""
    if SAME:
        bits = values.to(tl.uint64)
        if HIGH:
            bits += (bits >> 32) * HIGH
        return bits
    return values.to(ENGINE).to(RAW, bitcast=True).to(tl.uint64)


@triton.jit
def sum_chunks(
    table: tl.tensor,
    sums: tl.tensor,
    SOURCE: tl.constexpr,
    ENGINE: tl.constexpr,
    RAW: tl.constexpr,
    SAME: tl.constexpr,
    PER_WORD: tl.constexpr,
    WORDS: tl.constexpr,
    HIGH: tl.constexpr,
    SALT: tl.constexpr,
):
    """Add one contiguous chunk a program to its row's sum.

    Rows of `table` are the address of the chunk's first element, that element's place in the engine tensor, the number
    of elements, and the row of `sums`. A block is `WORDS` words of the engine tensor; `checksum.py` has the formula.
    """
    BLOCK: tl.constexpr = PER_WORD * WORDS
    row = table + tl.program_id(0) * 4
    address, first, count, number = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    past = first + count
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.uint64)
    first_block = first // BLOCK
    if ((first % BLOCK == 0) & (count % BLOCK == 0)) & (address % 16 == 0):
        elements = tl.multiple_of(address.to(tl.pointer_type(SOURCE)), 16)
        for block in range(0, (count // BLOCK).to(tl.int32)):
            values = tl.load(elements + block * BLOCK + lane, eviction_policy="evict_first")
            total += bits_of(values, SAME, ENGINE, RAW, HIGH if PER_WORD == 1 else 0) * odd_mix(
                (first_block + block).to(tl.uint64) + 1
            )
    else:
        elements = address.to(tl.pointer_type(SOURCE))
        for block in range(0, ((past - 1) // BLOCK - first_block + 1).to(tl.int32)):
            places = (first_block + block) * BLOCK + lane
            inside = (places >= first) & (places < past)
            values = tl.load(elements + (places - first), mask=inside, other=0, eviction_policy="evict_first")
            bits = bits_of(values, SAME, ENGINE, RAW, HIGH if PER_WORD == 1 else 0)
            total += bits * odd_mix((first_block + block).to(tl.uint64) + 1)
    if PER_WORD > 1:
        HALF: tl.constexpr = PER_WORD // 2
        slot = lane % PER_WORD
        total = total << (slot % HALF * (32 // HALF)).to(tl.uint64)
        total *= tl.where(slot >= HALF, HIGH + (1 << 32), 1).to(tl.uint64)
    total *= odd_mix((lane // PER_WORD).to(tl.uint64) + SALT)
    tl.atomic_add(sums + number, tl.sum(total, axis=0).to(tl.int64), sem="relaxed")
