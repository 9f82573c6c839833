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
def channel_parameters(word, units, ASM: tl.constexpr):
    """Words (scale lo, scale hi, min lo + 128, min hi + 128) -> fp16 (scale lo, scale hi, min - 16 scale lo, hi).

    `units` holds the word of the fp16 units (scale, min) for each of them. The 16 undoes the exponent that
    `unpack_k` puts on the codes. Every step but the last is rounded at most once.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f, s, m, z, t;
            prmt.b32 s, $6, $7, 0x1010;
            prmt.b32 m, $6, $7, 0x3232;
            mov.b32 t, 0xE400E400;
            mul.rn.f16x2 z, s, t;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $4, $5, 0x7362;
            prmt.b32 c, a, 0x64646464, 0x4140;
            prmt.b32 d, a, 0x64646464, 0x4342;
            prmt.b32 e, b, 0x64646464, 0x4140;
            prmt.b32 f, b, 0x64646464, 0x4342;
            fma.rn.f16x2 c, c, s, z;
            fma.rn.f16x2 d, d, s, z;
            mov.b32 t, 0xE480E480;
            add.rn.f16x2 e, e, t;
            add.rn.f16x2 f, f, t;
            mov.b32 $0, c;
            mov.b32 $1, d;
            mov.b32 t, 0xCC00CC00;
            mul.rn.f16x2 c, c, t;
            mul.rn.f16x2 d, d, t;
            fma.rn.f16x2 $2, e, m, c;
            fma.rn.f16x2 $3, f, m, d; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            args=[word, units],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    scale_unit = low_half(units)
    min_unit = high_half(units)
    scale_low = (word & 255).to(tl.float16) * scale_unit
    scale_high = ((word >> 8) & 255).to(tl.float16) * scale_unit
    min_low = (((word >> 16) & 255) - 128).to(tl.float16) * min_unit
    min_high = (((word >> 24) & 255) - 128).to(tl.float16) * min_unit
    return scale_low, scale_high, min_low - 16.0 * scale_low, min_high - 16.0 * scale_high


@triton.jit
def unpack_k(x, scale_low, scale_high, min_low, min_high, ASM: tl.constexpr):
    """Bytes -> fp16 values of their low and high codes; the mins come as min - 16 scale."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shl.b32 a, $4, 6;
            shr.u32 b, $4, 2;
            shl.b32 c, $4, 2;
            shr.u32 d, $4, 6;
            lop3.b32 a, a, 0x03c003c0, 0x4c004c00, 0xea;
            lop3.b32 b, b, 0x03c003c0, 0x4c004c00, 0xea;
            lop3.b32 c, c, 0x03c003c0, 0x4c004c00, 0xea;
            lop3.b32 d, d, 0x03c003c0, 0x4c004c00, 0xea;
            fma.rn.f16x2 $0, a, $5, $9;
            fma.rn.f16x2 $1, b, $6, $10;
            fma.rn.f16x2 $2, c, $7, $11;
            fma.rn.f16x2 $3, d, $8, $12; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            args=[x, scale_low, scale_high, min_low, min_high],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    low = ((x & 15).to(tl.float16) + 16.0) * scale_low + min_low
    high = (((x >> 4) & 15).to(tl.float16) + 16.0) * scale_high + min_high
    return low, high


@triton.jit
def unpack_v(x, ASM: tl.constexpr):
    """Bytes -> fp16 (low code - 8, high code - 8).

    Leaving the 1024 and 64 of the bit trick to be taken off the sums would save the additions, but the tensor
    cores cut what they accumulate: the error grew to 2 % over 4096 tokens.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 v, a, b, c, d, m, n;
            shr.u32 v, $4, 8;
            lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, v,  0x000f000f, 0x64006400, 0xea;
            lop3.b32 c, $4, 0x00f000f0, 0x54005400, 0xea;
            lop3.b32 d, v,  0x00f000f0, 0x54005400, 0xea;
            mov.b32 n, 0xE408E408;
            mov.b32 m, 0xD480D480;
            add.rn.f16x2 $0, a, n;
            add.rn.f16x2 $1, b, n;
            add.rn.f16x2 $2, c, m;
            add.rn.f16x2 $3, d, m; }""",
            "=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return (x & 15).to(tl.float16) - 8.0, ((x >> 4) & 15).to(tl.float16) - 8.0


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
    """Where element i lies; with `ASM` the instructions of `unpack_*` undo the order themselves."""
    if ASM:
        return i
    return (i & -4) | ((i & 1) << 1) | ((i >> 1) & 1)
