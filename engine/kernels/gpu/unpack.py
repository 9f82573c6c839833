"""Codes to fp16 in registers: integer tricks on the mantissa, since casts would cost more than the memory does.

With `ASM` false the same arithmetic is plain Triton, which the interpreter runs too.
"""
# pyright: reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def low_half(x):
    return (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(x):
    return ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pack_halves(low, high):
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def byte_plus_1024(x, ASM: tl.constexpr):
    """Bytes u as fp16 1024 + u: u becomes the low mantissa bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0x64646464, 0x4140;
            prmt.b32 $1, $2, 0x64646464, 0x4342; }""",
            "=r,=r,r",
            args=[x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return (x.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def byte_minus_128(x, ASM: tl.constexpr):
    """Bytes u as fp16 u - 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mov.b32 c, 0xE480E480;
            prmt.b32 a, $2, 0x64646464, 0x4140;
            prmt.b32 b, $2, 0x64646464, 0x4342;
            add.rn.f16x2 $0, a, c;
            add.rn.f16x2 $1, b, c; }""",
            "=r,=r,r",
            args=[x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return (x.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def tiny_codes(x, ASM: tl.constexpr):
    """Bytes -> fp16 (low code * 2^-24, high code * 2^-20): codes as they lie are subnormal numbers.

    Nothing has to be added or taken off: who multiplies by them undoes the powers of two.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 v;
            shr.u32 v, $4, 8;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, v,  0x000f000f;
            and.b32 $2, $4, 0x00f000f0;
            and.b32 $3, v,  0x00f000f0; }""",
            "=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    x = x.to(tl.int16)
    return (x & 15).to(tl.float16, bitcast=True), (x & 240).to(tl.float16, bitcast=True)


@triton.jit
def scale_queries(word, q_low, q_high, ASM: tl.constexpr):
    """q times the scales in words (scale low, scale high, min low, min high), as fp16 q * scale * 2^-24."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, $3, 0x5410;
            prmt.b32 b, a, 0, 0x4341;
            and.b32 a, a, 0x00ff00ff;
            mul.rn.f16x2 $0, a, $4;
            mul.rn.f16x2 $1, b, $5; }""",
            "=&r,=&r,r,r,r,r",
            args=[word, q_low, q_high],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = (word & 255).to(tl.int16).to(tl.float16, bitcast=True)
    high = ((word >> 8) & 255).to(tl.int16).to(tl.float16, bitcast=True)
    return low * q_low, high * q_high


@triton.jit
def tiny_mins(word, ASM: tl.constexpr):
    """Words (scale low, scale high, min low, min high) -> fp16 (min low, min high) * 2^-24."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            prmt.b32 a, $2, $3, 0x7632;
            prmt.b32 $1, a, 0, 0x4341;
            and.b32 $0, a, 0x00ff00ff; }""",
            "=&r,=&r,r,r",
            args=[word],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = ((word >> 16) & 255).to(tl.int16).to(tl.float16, bitcast=True)
    return low, ((word >> 24) & 255).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def exchange_middle(x, ASM: tl.constexpr):
    """Bytes in fours, the middle two exchanged: the order in which int4 is stored."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x3120;", "=r,r", args=[x], dtype=tl.uint8, is_pure=True, pack=4
        )
    return x


@triton.jit
def stored_index(i, ASM: tl.constexpr):
    """Where element i lies; with `ASM` those of `tiny_codes` undo the order themselves."""
    if ASM:
        return i
    return (i & -4) | ((i & 1) << 1) | ((i >> 1) & 1)
