"""Re-encoding and dequantizing pages: Triton code. Arithmetic and rounding follow `kvpilot.engine.kv.codecs`.

A page that holds a NaN or an infinity keeps it: the scales that cover the value become NaN.
"""
# pyright: reportMissingImports=false

import triton
import triton.language as tl

from kvpilot.engine.kernels.gpu.unpack import exchange_middle, high_half, low_half, pack_halves, stored_index

# Bytes per load: what is computed per channel or token is computed by every thread that holds a value of it
NARROW: tl.constexpr = tl.constexpr(4)
TINY: tl.constexpr = tl.constexpr(1.1754944e-38)


@triton.jit
def _half_up(x):
    return (x + tl.abs(x) * 0.00048828125).to(tl.float16)


@triton.jit
def _nearest(x):
    """Integers of |x| < 2^22, ties to even."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _encode_rows(x, IS_FP8: tl.constexpr):
    """Float rows -> bytes and an fp16 scale per row."""
    LARGEST: tl.constexpr = 448.0 if IS_FP8 else 127.0
    largest = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)  # NaN and infinities come through the sum
    scale = (largest / LARGEST).to(tl.float16)
    codes = x / tl.maximum(scale.to(tl.float32), TINY)[:, None]
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
    if IS_FP8:
        return codes.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale
    return (_nearest(codes) + 128).to(tl.uint8), scale


@triton.jit
def _decode_bytes(x, IS_FP8: tl.constexpr):
    if IS_FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return x.to(tl.float32) - 128.0


@triton.jit
def exact_to_byte(
    pool, jobs, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, IS_FP8: tl.constexpr
):
    """Grid (kv heads, layers, pages); `jobs` int64 [pages, 4]: offsets of source (payload, scales) and target."""
    head = tl.program_id(0)
    layer = tl.program_id(1)
    job = jobs + tl.program_id(2) * 4
    BLOCK: tl.constexpr = PAGE * HEAD_DIM
    block = (layer * (2 * NUM_KV_HEADS) + head) * BLOCK
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, HEAD_DIM)
    source = (pool + tl.multiple_of(tl.load(job), 16)).to(tl.pointer_type(tl.bfloat16)) + block
    at = tokens[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(source + at).to(tl.float32)
    v = tl.load(source + NUM_KV_HEADS * BLOCK + at).to(tl.float32)
    k, k_scale = _encode_rows(k, IS_FP8)
    v, v_scale = _encode_rows(v, IS_FP8)
    target = pool + tl.multiple_of(tl.load(job + 2), 16) + block
    tl.store(target + at, k)
    tl.store(target + NUM_KV_HEADS * BLOCK + dims[:, None] * PAGE + tokens[None, :], tl.trans(v))
    record = tl.multiple_of(tl.load(job + 3), 4) + (layer * NUM_KV_HEADS + head) * (4 * PAGE)
    words = (pool + record).to(tl.pointer_type(tl.int32))
    tl.store(words + tokens, pack_halves(k_scale, v_scale))


@triton.jit
def _load_half(source, words, begin, KIND: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """K's dims begin .. begin + HEAD_DIM / 2 - 1 of an exact (KIND 0) or 8-bit block, float [token, dim]."""
    tokens = tl.arange(0, PAGE)
    dims = begin + tl.max_contiguous(tl.arange(0, HEAD_DIM // 2), NARROW)
    at = tokens[:, None] * HEAD_DIM + dims[None, :]
    if KIND == 0:
        return tl.load(source.to(tl.pointer_type(tl.bfloat16)) + at).to(tl.float32)
    scale = low_half(tl.load(words + tokens)).to(tl.float32)
    return _decode_bytes(tl.load(source + at), KIND == 2) * scale[:, None]


@triton.jit
def _load_values(source, words, begin, KIND: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """V's tokens begin .. begin + PAGE / 2 - 1, float [dim, token]."""
    tokens = begin + tl.max_contiguous(tl.arange(0, PAGE // 2), NARROW)
    dims = tl.arange(0, HEAD_DIM)
    if KIND == 0:
        at = tokens[None, :] * HEAD_DIM + dims[:, None]
        return tl.load(source.to(tl.pointer_type(tl.bfloat16)) + at).to(tl.float32)
    scale = high_half(tl.load(words + tokens)).to(tl.float32)
    return _decode_bytes(tl.load(source + dims[:, None] * PAGE + tokens[None, :]), KIND == 2) * scale[None, :]


@triton.jit
def _channel_range(k, min_unit):
    """Byte mins [dim], what they stand for, and the step from there that 15 codes need, before it is rounded."""
    mins = tl.floor(tl.min(k, 0) * (1.0 / tl.maximum(min_unit, TINY)))
    mins = tl.minimum(tl.maximum(mins, -127.0), 127.0)
    low = mins * min_unit
    step = tl.maximum(tl.max(k, 0) - low, 0.0) * (1.0 / 15.0)
    return mins.to(tl.int32) + 128, low, step


@triton.jit
def _channel_codes(k, low, step, scale_unit):
    """Codes [token, dim] and byte scales [dim]."""
    scales = tl.ceil(step * (1.0 / tl.maximum(scale_unit, TINY)))
    scales = tl.minimum(tl.maximum(scales, 0.0), 255.0)
    inverse = 1.0 / tl.maximum(scales * scale_unit, TINY)
    codes = (k - low[None, :]) * inverse[None, :]
    return _nearest(tl.minimum(tl.maximum(codes, 0.0), 15.0)), scales.to(tl.int32)


@triton.jit
def _token_codes(v):
    """Codes [dim, token] with fp16 scale and min per token."""
    low = -_half_up(-tl.min(v, 0)) + tl.sum(v * 0.0, 0).to(tl.float16)
    scale = _half_up((tl.max(v, 0) - low.to(tl.float32)) * (1.0 / 15.0))
    inverse = 1.0 / tl.maximum(scale.to(tl.float32), TINY)
    codes = (v - low.to(tl.float32)[None, :]) * inverse[None, :]
    return _nearest(tl.minimum(tl.maximum(codes, 0.0), 15.0)), scale, low


@triton.jit
def to_int4(
    pool, jobs, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `exact_to_byte`, from pages of KIND exact (0), int8 (1) or fp8 (2)."""
    head = tl.program_id(0)
    layer = tl.program_id(1)
    job = jobs + tl.program_id(2) * 4
    BLOCK: tl.constexpr = PAGE * HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    VALUE_BYTES: tl.constexpr = 2 if KIND == 0 else 1
    # `exchange_middle` needs threads to hold four neighbours, which V of exact pages, loaded across, does not give
    SWAP: tl.constexpr = ASM and KIND != 0
    block = (layer * (2 * NUM_KV_HEADS) + head) * BLOCK
    scale_block = layer * NUM_KV_HEADS + head
    source = pool + tl.multiple_of(tl.load(job), 16) + block * VALUE_BYTES
    source_v = source + NUM_KV_HEADS * BLOCK * VALUE_BYTES
    source_record = tl.maximum(tl.load(job + 1), 0) + scale_block * (4 * PAGE)
    source_words = (pool + tl.multiple_of(source_record, 4)).to(tl.pointer_type(tl.int32))
    target = pool + tl.multiple_of(tl.load(job + 2), 16) + block // 2
    record = tl.load(job + 3) + scale_block * (2 * HEAD_DIM + 4 + 4 * PAGE)
    words = (pool + tl.multiple_of(record, 4)).to(tl.pointer_type(tl.int32))
    tokens = tl.arange(0, PAGE)
    channels = tl.max_contiguous(tl.arange(0, HALF), NARROW)

    k_a = _load_half(source, source_words, 0, KIND, PAGE, HEAD_DIM)
    k_b = _load_half(source, source_words, HALF, KIND, PAGE, HEAD_DIM)
    broken = tl.sum(tl.sum(k_a * 0.0 + k_b * 0.0, 0), 0)  # 0, or NaN
    largest = tl.maximum(tl.max(tl.abs(tl.min(k_a, 0)), 0), tl.max(tl.abs(tl.min(k_b, 0)), 0))
    min_unit = _half_up(largest / 127.0 + broken)
    mins_a, low_a, step_a = _channel_range(k_a, min_unit.to(tl.float32))
    mins_b, low_b, step_b = _channel_range(k_b, min_unit.to(tl.float32))
    scale_unit = _half_up(tl.maximum(tl.max(step_a, 0), tl.max(step_b, 0)) / 255.0)
    codes_a, scales_a = _channel_codes(k_a, low_a, step_a, scale_unit.to(tl.float32))
    codes_b, scales_b = _channel_codes(k_b, low_b, step_b, scale_unit.to(tl.float32))
    packed = exchange_middle((codes_a | (codes_b << 4)).to(tl.uint8), SWAP)
    tl.store(target + tokens[:, None] * HALF + stored_index(channels, SWAP)[None, :], packed)
    tl.store(words + channels, scales_a | (scales_b << 8) | (mins_a << 16) | (mins_b << 24))
    tl.store(words + HALF, pack_halves(scale_unit, min_unit))

    dims = tl.arange(0, HEAD_DIM)
    pairs = tl.max_contiguous(tl.arange(0, PAGE // 2), NARROW)
    codes_a, scale_a, v_low_a = _token_codes(_load_values(source_v, source_words, 0, KIND, PAGE, HEAD_DIM))
    codes_b, scale_b, v_low_b = _token_codes(
        _load_values(source_v, source_words, PAGE // 2, KIND, PAGE, HEAD_DIM)
    )
    packed = exchange_middle((codes_a | ((15 - codes_b) << 4)).to(tl.uint8), SWAP)
    target_v = target + NUM_KV_HEADS * BLOCK // 2
    tl.store(target_v + dims[:, None] * (PAGE // 2) + stored_index(pairs, SWAP)[None, :], packed)
    tl.store(words + HALF + 1 + pairs, pack_halves(scale_a, v_low_a))
    tl.store(words + HALF + 1 + PAGE // 2 + pairs, pack_halves(scale_b, v_low_b))


@triton.jit
def _int4_block(base, words, V_OFFSET: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """K [token, dim] and V [token, dim] of an int4 block, float32."""
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, HEAD_DIM)
    channels = dims % HALF
    parameter = tl.load(words + channels)
    is_high = dims >= HALF
    units = tl.load(words + HALF)
    scale = tl.where(is_high, parameter >> 8, parameter) & 255
    low = (tl.where(is_high, parameter >> 24, parameter >> 16) & 255) - 128
    x = tl.load(base + tokens[:, None] * HALF + stored_index(channels, False)[None, :])
    codes = tl.where(is_high[None, :], x >> 4, x & 15).to(tl.float32)
    k_scale = scale.to(tl.float32) * low_half(units).to(tl.float32)
    k_low = low.to(tl.float32) * high_half(units).to(tl.float32)
    k = codes * k_scale[None, :] + k_low[None, :]
    pairs = tokens % (PAGE // 2)
    x = tl.load(base + V_OFFSET + dims[None, :] * (PAGE // 2) + stored_index(pairs, False)[:, None])
    codes = tl.where((tokens >= PAGE // 2)[:, None], 15 - (x >> 4), x & 15).to(tl.float32)
    record = tl.load(words + HALF + 1 + tokens)
    v = codes * low_half(record).to(tl.float32)[:, None] + high_half(record).to(tl.float32)[:, None]
    return k, v


@triton.jit
def first_token_kernel(pool, jobs, BLOCKS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Grid (blocks of a page in groups, pages): the first token of exact pages; `jobs` int64 [pages, 2]: offsets."""
    job = jobs + tl.program_id(1) * 2
    source = (pool + tl.multiple_of(tl.load(job), 16)).to(tl.pointer_type(tl.bfloat16))
    target = (pool + tl.multiple_of(tl.load(job + 1), 16)).to(tl.pointer_type(tl.bfloat16))
    block = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = block[:, None] * (PAGE * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    inside = (block < BLOCKS)[:, None]
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def move_kernel(pool, jobs, WORDS: tl.constexpr):
    """Grid (blocks of a range, ranges); `jobs` int64 [ranges, 3]: source, target, number of bytes."""
    job = jobs + tl.program_id(1) * 3
    source = (pool + tl.multiple_of(tl.load(job), 4)).to(tl.pointer_type(tl.int32))
    target = (pool + tl.multiple_of(tl.load(job + 1), 4)).to(tl.pointer_type(tl.int32))
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < tl.load(job + 2) // 4
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def gather_kernel(
    pool, pages, k_ptr, v_ptr, layer,
    NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BYTE_LEVEL: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, pages): pages as dense bf16 [tokens, kv heads, HEAD_DIM].

    `pages` int64 [pages, 5]: level, payload, scales, first row of the result, tokens wanted. Level 0 is exact,
    BYTE_LEVEL (-1: none) 8-bit, others int4.
    """
    head = tl.program_id(0)
    page = pages + tl.program_id(1) * 5
    BLOCK: tl.constexpr = PAGE * HEAD_DIM
    level = tl.load(page)
    payload = tl.multiple_of(tl.load(page + 1), 16)
    record = tl.maximum(tl.multiple_of(tl.load(page + 2), 4), 0)
    block = layer * (2 * NUM_KV_HEADS) + head
    scale_block = layer * NUM_KV_HEADS + head
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, HEAD_DIM)
    at = tokens[:, None] * HEAD_DIM + dims[None, :]
    k = tl.zeros([PAGE, HEAD_DIM], tl.float32)
    v = tl.zeros([PAGE, HEAD_DIM], tl.float32)
    if level == 0:
        exact = (pool + payload).to(tl.pointer_type(tl.bfloat16)) + block * BLOCK
        k = tl.load(exact + at).to(tl.float32)
        v = tl.load(exact + NUM_KV_HEADS * BLOCK + at).to(tl.float32)
    elif level == BYTE_LEVEL:
        base = pool + payload + block * BLOCK
        words = (pool + record + scale_block * (4 * PAGE)).to(tl.pointer_type(tl.int32))
        scales = tl.load(words + tokens)
        k = _decode_bytes(tl.load(base + at), IS_FP8) * low_half(scales).to(tl.float32)[:, None]
        v = tl.load(base + NUM_KV_HEADS * BLOCK + dims[None, :] * PAGE + tokens[:, None])
        v = _decode_bytes(v, IS_FP8) * high_half(scales).to(tl.float32)[:, None]
    else:
        base = pool + payload + block * (BLOCK // 2)
        words = (pool + record + scale_block * (2 * HEAD_DIM + 4 + 4 * PAGE)).to(tl.pointer_type(tl.int32))
        k, v = _int4_block(base, words, NUM_KV_HEADS * BLOCK // 2, PAGE, HEAD_DIM)
    rows = (tl.load(page + 3) + tokens) * NUM_KV_HEADS + head
    out_at = rows[:, None] * HEAD_DIM + dims[None, :]
    is_valid = (tokens < tl.load(page + 4))[:, None]
    tl.store(k_ptr + out_at, k.to(tl.bfloat16), mask=is_valid)
    tl.store(v_ptr + out_at, v.to(tl.bfloat16), mask=is_valid)
