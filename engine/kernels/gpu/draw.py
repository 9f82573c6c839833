"""Draws the next token of every row of logits on the device, so that the step after it need not wait for the host.

Shape suffixes: N rows, V vocabulary.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
LOWEST_KEY: tl.constexpr = tl.constexpr(-32769)  # below those of all numbers
KEY_BITS: tl.constexpr = tl.constexpr(17)


@triton.jit
def _keys(x):
    """Integers in the order of numbers that bf16 can hold."""
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits >= 0, bits, -32769 - bits)


@triton.jit
def _value(key):
    bits = tl.where(key >= 0, key, -32769 - key)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _weights(row_ptr, begin, largest, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block of tokens, relative to the most likely one, and their keys."""
    at = begin + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < SIZE, other=-float("inf")).to(tl.float32)
    return tl.where(at < SIZE, tl.exp((x - largest) / temperature), 0.0), _keys(x), at


@triton.jit
def _from_key(row_ptr, key, largest, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have this key or a larger one, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, SIZE, BLOCK):
        weights, keys, at = _weights(row_ptr, begin, largest, temperature, SIZE, BLOCK)
        inside = (keys >= key) & (at < SIZE)
        count += inside.to(tl.int32)
        mass += tl.where(inside, weights, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _filter(row_ptr, top_k, top_p, largest, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """What `top_k`, then `top_p` keep: all tokens above a key, and so many of those with this key; and the weight of
    all of them."""
    key = LOWEST_KEY
    ties = 0
    _, mass = _from_key(row_ptr, LOWEST_KEY, largest, temperature, SIZE, BLOCK)
    if top_k > 0:
        end = 32768
        for _ in tl.range(0, KEY_BITS):  # the largest key that enough tokens reach
            middle = (key + end) >> 1
            count, _ = _from_key(row_ptr, middle, largest, temperature, SIZE, BLOCK)
            key = tl.where(count >= top_k, middle, key)
            end = tl.where(count >= top_k, end, middle)
        count, mass = _from_key(row_ptr, key + 1, largest, temperature, SIZE, BLOCK)
        ties = top_k - count
        mass += ties * tl.exp((_value(key) - largest) / temperature)
    if top_p < 1:
        limit = top_p * mass
        lowest, most = key, ties
        end = 32768
        for _ in tl.range(0, KEY_BITS):  # the largest key from which on there is enough weight
            middle = (key + end) >> 1
            _, above = _from_key(row_ptr, middle, largest, temperature, SIZE, BLOCK)
            enough = (above >= limit) & (middle > lowest)
            key = tl.where(enough, middle, key)
            end = tl.where(enough, end, middle)
        _, above = _from_key(row_ptr, key + 1, largest, temperature, SIZE, BLOCK)
        weight = tl.exp((_value(key) - largest) / temperature)
        ties = tl.maximum(tl.ceil((limit - above) / weight), 1.0).to(tl.int32)
        ties = tl.where(key == lowest, tl.minimum(ties, most), ties)
        mass = above + ties * weight
    return key, ties, mass


@triton.jit
def _draw_kernel(x_ptr, choices_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_ptr = x_ptr + row.to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, SIZE, BLOCK):
        x = tl.load(row_ptr + begin + at, mask=begin + at < SIZE, other=-float("inf")).to(tl.float32)
        where = tl.where(x > best, begin + at, where)
        best = tl.maximum(x, best)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, where, SIZE - 1), 0)
    temperature = tl.load(choices_ptr + row * 4)
    if temperature > 0:
        top_k = tl.load(choices_ptr + row * 4 + 1).to(tl.int32)
        top_p = tl.load(choices_ptr + row * 4 + 2)
        uniform = tl.load(choices_ptr + row * 4 + 3)
        key, ties, mass = _filter(row_ptr, top_k, top_p, largest, temperature, SIZE, BLOCK)
        target = uniform * mass
        before, ties_before, found = 0.0, 0, 0
        for begin in tl.range(0, SIZE, BLOCK):
            weights, keys, tokens = _weights(row_ptr, begin, largest, temperature, SIZE, BLOCK)
            tied = (keys == key) & (tokens < SIZE)
            rank = ties_before + tl.cumsum(tied.to(tl.int32), 0)
            weights = tl.where((keys > key) | (tied & (rank <= ties)), weights, 0.0)
            sums = before + tl.cumsum(weights, 0)
            first = tl.min(tl.where((sums > target) & (weights > 0), tokens, SIZE), 0)
            hit = (found == 0) & (first < SIZE)
            token = tl.where(hit, first, token)
            found = tl.where(hit, 1, found)
            before += tl.sum(weights, 0)
            ties_before += tl.sum(tied.to(tl.int32), 0)
    tl.store(out_ptr + row, token.to(tl.int64))


def draw(x_NV: Tensor, choices_N4: Tensor, out_N: Tensor) -> None:
    """One token per row of logits, int64: numbers that bf16 can hold, in any float type, in contiguous rows.

    `choices_N4` is float32: temperature (0: the first of the most likely tokens), top_k (0: all), top_p, and where in
    [0, 1) of the kept tokens' weight the drawn one lies, these in order of their ids. Of tokens as likely as the last
    one kept, those with the lowest ids are kept.
    """
    size = x_NV.shape[1]
    block = min(BLOCK, triton.next_power_of_2(size))
    _draw_kernel[(len(x_NV),)](x_NV, choices_N4, out_N, SIZE=size, BLOCK=block, num_warps=16)
