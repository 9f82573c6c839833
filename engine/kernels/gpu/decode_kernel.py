"""Decode attention over pages of three precisions in one launch: Triton code.

Scores are computed transposed, S = K q^T and O = V^T P, so that the tokens (of which there are many) are the
rows of the tensor core tile and the query heads of a kv head fill its 8 columns. One warp handles one item, a
share of a sequence's pages, for one kv head, a page at a time; the running sum of the softmax is reduced at the end.
Scales never touch a tile of int8: K's multiply the scores, V's the probabilities.
"""
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from kvpilot.engine.kernels.gpu.unpack import (
    byte_minus_128,
    byte_plus_1024,
    high_half,
    low_half,
    scale_queries,
    stored_index,
    tiny_codes,
    tiny_mins,
)

# Low and high codes of int4 come times 2^-24 and 2^-20, scales and mins times 2^-24, all of them subnormal in fp16.
# What they are multiplied by makes up for the 2^4 and is raised, so that it stays in fp16's normal range; sums are in
# float32.
LOW_GAIN: tl.constexpr = tl.constexpr(128.0)  # of queries: |q| < 512
HIGH_GAIN: tl.constexpr = tl.constexpr(8.0)
SCORE_UNIT: tl.constexpr = tl.constexpr(2.0**41)  # 2^48 / LOW_GAIN
LOW_WEIGHT: tl.constexpr = tl.constexpr(4.0)  # of probabilities times V's scales
HIGH_WEIGHT: tl.constexpr = tl.constexpr(-0.25)  # V's high codes are stored as 15 - code, see `layout`
SUM_UNIT: tl.constexpr = tl.constexpr(2.0**22)  # 2^24 / LOW_WEIGHT
MIN_UNIT: tl.constexpr = tl.constexpr(2.0**24)


@triton.jit
def _dot_bf16(a, b, acc, ASM: tl.constexpr):
    if not ASM:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def _load_q(q_ptr, rows, valid, scale, begin, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Dims begin .. begin + WIDTH - 1 of the query heads as columns, times `scale`."""
    dims = begin + tl.arange(0, WIDTH)
    q = tl.load(q_ptr + rows[None, :] * HEAD_DIM + dims[:, None], mask=valid[None, :], other=0.0)
    return q.to(tl.float32) * scale


@triton.jit
def _exact_pages(
    q, m, total, acc, pool, table, first, begin, end, num_tokens, k_offset,
    ASM: tl.constexpr, V_OFFSET: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """STEP tokens at a time: parts of a page take less shared memory on their way."""
    PARTS: tl.constexpr = PAGE // STEP
    tokens = tl.arange(0, STEP)
    dims = tl.arange(0, HEAD_DIM)
    zeros = tl.zeros([STEP, 8], tl.float32)
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=STAGES):
        page = tl.load(table + 2 * (i // PARTS)) * 16
        base = (pool + page + k_offset).to(tl.pointer_type(tl.bfloat16)) + i % PARTS * (STEP * HEAD_DIM)
        k = tl.load(base + tokens[:, None] * HEAD_DIM + dims[None, :])
        s = _dot_bf16(k, q, zeros, ASM)
        is_valid = (i - first * PARTS) * STEP + tokens < num_tokens
        s = tl.where(is_valid[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new[None, :])
        shrink = tl.exp2(m - m_new)
        total = total * shrink[None, :] + p
        v_at = base + V_OFFSET // 2 + tokens[None, :] * HEAD_DIM + dims[:, None]
        # What lies behind the last token of an open page may be NaN, which a probability of 0 does not remove
        v = tl.load(v_at, mask=is_valid[None, :], other=0.0)
        acc = _dot_bf16(v, p.to(tl.bfloat16), acc * shrink[None, :], ASM)
        m = m_new
    return m, total, acc


@triton.jit
def _byte_pages(
    q, m, total, acc, pool, table, begin, end, k_offset, scale_offset,
    IS_FP8: tl.constexpr, ASM: tl.constexpr, V_OFFSET: tl.constexpr,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, HEAD_DIM)
    bias = tl.sum(q.to(tl.float32), 0) * 1152.0
    for i in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(table + 2 * i) * 16
        record = tl.load(table + 2 * i + 1) * 4
        base = pool + page + k_offset
        k = tl.load(base + tokens[:, None] * HEAD_DIM + dims[None, :])
        scales = tl.load((pool + record + scale_offset).to(tl.pointer_type(tl.int32)) + tokens)
        if IS_FP8:
            s = tl.dot(k.to(tl.float8e4nv, bitcast=True).to(tl.float16), q)
        else:
            s = tl.dot(byte_plus_1024(k, ASM), q) - bias[None, :]
        s = s * low_half(scales).to(tl.float32)[:, None]
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new[None, :])
        shrink = tl.exp2(m - m_new)
        total = total * shrink[None, :] + p
        v = tl.load(base + V_OFFSET + dims[:, None] * PAGE + tokens[None, :])
        v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16) if IS_FP8 else byte_minus_128(v, ASM)
        p = p * high_half(scales).to(tl.float32)[:, None]
        acc = tl.dot(v, p.to(tl.float16), acc * shrink[None, :])
        m = m_new
    return m, total, acc


@triton.jit
def _int4_scores(
    raised_low, raised_high, q_low, q_high, q_sum, q_scale, base, words,
    ASM: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Codes times (q times K's scales), plus q times K's mins."""
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, PAGE)
    word = tl.load(words + tl.arange(0, HALF))
    units = tl.load(words + HALF + tokens * 0)  # pipelined only as a vector
    scaled_low, scaled_high = scale_queries(word[:, None], raised_low, raised_high, ASM)
    min_low, min_high = tiny_mins(word[None, :], ASM)
    min_low = tl.broadcast_to(min_low, [16, HALF])
    min_high = tl.broadcast_to(min_high, [16, HALF])
    shift = tl.dot(min_high, q_high, tl.dot(min_low, q_low)) - q_sum[None, :]  # the same in all rows
    shift = tl.reshape(tl.broadcast_to(shift[None], [PAGE // 16, 16, 8]), [PAGE, 8])
    x = tl.load(base + tokens[:, None] * HALF + stored_index(tl.arange(0, HALF), ASM)[None, :])
    low, high = tiny_codes(x, ASM)
    s = tl.dot(high, scaled_high, tl.dot(low, scaled_low))
    s = s * (low_half(units).to(tl.float32) * (q_scale * SCORE_UNIT))[:, None]
    return s + shift * (high_half(units).to(tl.float32) * (q_scale * MIN_UNIT))[:, None]


@triton.jit
def _int4_pages(
    raised_low, raised_high, q_low, q_high, q_sum, q_scale, m, total, shift, acc, pool, table, begin, end,
    k_offset, scale_offset,
    ASM: tl.constexpr, V_OFFSET: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`acc` is in units of 1 / SUM_UNIT; what V's mins add to all dims goes to `shift`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, HEAD_DIM)
    stored = stored_index(tl.arange(0, PAGE // 2), ASM)
    weight = tl.where(tokens < PAGE // 2, LOW_WEIGHT, HIGH_WEIGHT)
    turned = tl.where(tokens < PAGE // 2, 0.0, 15.0 / HIGH_WEIGHT)
    for i in tl.range(begin, end, num_stages=STAGES):
        base = pool + tl.load(table + 2 * i) * 16 + k_offset
        words = (pool + tl.load(table + 2 * i + 1) * 4 + scale_offset).to(tl.pointer_type(tl.int32))
        s = _int4_scores(
            raised_low, raised_high, q_low, q_high, q_sum, q_scale, base, words, ASM, PAGE, HEAD_DIM
        )
        m_new = tl.maximum(m, tl.max(s, 0))
        shrink = tl.exp2(m - m_new)
        m = m_new
        p = tl.exp2(s - m_new[None, :])
        total = total * shrink[None, :] + p
        scales = tl.load(words + HALF + 1 + tokens)
        scaled = p * (low_half(scales).to(tl.float32) * weight)[:, None]
        shift = shift * shrink[None, :] + p * high_half(scales).to(tl.float32)[:, None]
        shift += scaled * turned[:, None]
        halves = tl.permute(tl.reshape(scaled.to(tl.float16), [2, PAGE // 2, 8]), [1, 2, 0])
        first, second = tl.split(halves)
        low, high = tiny_codes(tl.load(base + V_OFFSET + dims[:, None] * (PAGE // 2) + stored[None, :]), ASM)
        acc = tl.dot(high, second, tl.dot(low, first, acc * shrink[None, :]))
    return m, total, shift, acc


@triton.jit
def _pages_before(
    cost, num_exact, num_byte,
    EXACT_COST: tl.constexpr, BYTE_COST: tl.constexpr, INT4_COST: tl.constexpr,
):  # fmt: skip
    """How many exact, 8-bit and int4 pages come before this point."""
    after_exact = tl.maximum(cost - EXACT_COST * num_exact, 0)
    after_byte = tl.maximum(after_exact - BYTE_COST * num_byte, 0)
    before_exact = tl.minimum(cost // EXACT_COST, num_exact)
    return before_exact, tl.minimum(after_exact // BYTE_COST, num_byte), after_byte // INT4_COST


@triton.jit(do_not_specialize=["layer", "q_scale"])
def decode_kernel(
    q_ptr, pool, table, spans, items, out_ptr, partial_ptr, lse_ptr, layer, q_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_EXACT: tl.constexpr, BYTE_KIND: tl.constexpr, HAS_INT4: tl.constexpr, ASM: tl.constexpr,
    EXACT_COST: tl.constexpr, BYTE_COST: tl.constexpr, INT4_COST: tl.constexpr,
    EXACT_STEP: tl.constexpr, EXACT_STAGES: tl.constexpr, BYTE_STAGES: tl.constexpr, INT4_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, items). BYTE_KIND is 0 (no such pages), 1 (int8) or 2 (fp8).

    `items` int32 holds the sequence of each item (-1: nothing to do), those of a sequence in a row. `table` int64
    [pages, 2] holds the offsets of codes / 16 and of scales / 4, a sequence's pages sorted by level (a hint of
    alignment would not survive the pipelining of its load); `spans` int32 [B, 8]: first row, end of exact, of
    8-bit, of int4 rows, valid tokens of the exact pages, first item, number of items. A sequence of one item is
    written to `out` [B, heads, HEAD_DIM]; others to `partial` [items, heads, HEAD_DIM] with log2-sum-exp2.
    """
    if ASM:  # the merge may be brought up as soon as there is room: it waits for all items
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items + item)
    if sequence < 0:
        return
    columns = tl.arange(0, 8)
    valid = columns < GROUP
    rows = (sequence * NUM_KV_HEADS + head) * GROUP + columns
    span = spans + sequence * 8
    first = tl.load(span)
    exact_end = tl.load(span + 1)
    byte_end = tl.load(span + 2)
    int4_end = tl.load(span + 3)
    split = item - tl.load(span + 5)
    num_splits = tl.load(span + 6)

    # Equal shares of the cost, level after level: most items read one level only
    num_exact, num_byte = exact_end - first, byte_end - exact_end
    cost = EXACT_COST * num_exact + BYTE_COST * num_byte + INT4_COST * (int4_end - byte_end)
    begin = _pages_before(cost * split // num_splits, num_exact, num_byte, EXACT_COST, BYTE_COST, INT4_COST)
    end = _pages_before(
        cost * (split + 1) // num_splits, num_exact, num_byte, EXACT_COST, BYTE_COST, INT4_COST
    )

    HEAD_VALUES: tl.constexpr = PAGE * HEAD_DIM
    block = layer * (2 * NUM_KV_HEADS) + head
    scale_block = layer * NUM_KV_HEADS + head
    m = tl.full([8], -1e30, tl.float32)
    acc = tl.zeros([HEAD_DIM, 8], tl.float32)
    total_8 = tl.zeros([8], tl.float32)
    if HAS_EXACT:  # noqa: SIM102 - known when it is compiled, the next one is not
        if begin[0] < end[0]:
            q = _load_q(q_ptr, rows, valid, q_scale, 0, HEAD_DIM, HEAD_DIM).to(tl.bfloat16)
            total = tl.zeros([EXACT_STEP, 8], tl.float32)
            m, total, acc = _exact_pages(
                q, m, total, acc, pool, table, first, first + begin[0], first + end[0], tl.load(span + 4),
                block * (2 * HEAD_VALUES), ASM, 2 * NUM_KV_HEADS * HEAD_VALUES, PAGE, HEAD_DIM, EXACT_STEP,
                EXACT_STAGES,
            )  # fmt: skip
            total_8 = tl.sum(total, 0)
    if BYTE_KIND > 0:  # noqa: SIM102
        if begin[1] < end[1]:
            q = _load_q(q_ptr, rows, valid, q_scale, 0, HEAD_DIM, HEAD_DIM).to(tl.float16)
            total = tl.zeros([PAGE, 8], tl.float32)
            before = m
            m, total, acc = _byte_pages(
                q, m, total, acc, pool, table, exact_end + begin[1], exact_end + end[1], block * HEAD_VALUES,
                scale_block * (4 * PAGE), BYTE_KIND == 2, ASM, NUM_KV_HEADS * HEAD_VALUES, PAGE, HEAD_DIM,
                BYTE_STAGES,
            )  # fmt: skip
            total_8 = total_8 * tl.exp2(before - m) + tl.sum(total, 0)
    if HAS_INT4:  # noqa: SIM102
        if begin[2] < end[2]:
            HALF: tl.constexpr = HEAD_DIM // 2
            q_low = _load_q(q_ptr, rows, valid, 1.0, 0, HEAD_DIM, HALF)
            q_high = _load_q(q_ptr, rows, valid, 1.0, HALF, HEAD_DIM, HALF)
            q_sum = (tl.sum(q_low, 0) + tl.sum(q_high, 0)) * (128.0 / MIN_UNIT)  # mins are stored plus 128
            raised_low = (q_low * LOW_GAIN).to(tl.float16)
            raised_high = (q_high * HIGH_GAIN).to(tl.float16)
            q_low = q_low.to(tl.float16)
            q_high = q_high.to(tl.float16)
            total = tl.zeros([PAGE, 8], tl.float32)
            shift = tl.zeros([PAGE, 8], tl.float32)
            before = m
            acc = acc * (1.0 / SUM_UNIT)
            m, total, shift, acc = _int4_pages(
                raised_low, raised_high, q_low, q_high, q_sum, q_scale, m, total, shift, acc, pool, table,
                byte_end + begin[2], byte_end + end[2],
                block * (HEAD_VALUES // 2), scale_block * (2 * HEAD_DIM + 4 + 4 * PAGE),
                ASM, NUM_KV_HEADS * (HEAD_VALUES // 2), PAGE, HEAD_DIM, INT4_STAGES,
            )  # fmt: skip
            total_8 = total_8 * tl.exp2(before - m) + tl.sum(total, 0)
            acc = acc * SUM_UNIT + tl.sum(shift, 0)[None, :]

    dims = tl.arange(0, HEAD_DIM)
    total_8 = tl.maximum(total_8, 1e-30)  # an item may have no page
    out = acc / total_8[None, :]
    if num_splits == 1:
        out_at = out_ptr + rows[None, :] * HEAD_DIM + dims[:, None]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=valid[None, :])
    else:
        partial_rows = (item * NUM_KV_HEADS + head) * GROUP + columns
        partial_at = partial_ptr + partial_rows[None, :] * HEAD_DIM + dims[:, None]
        tl.store(partial_at, out, mask=valid[None, :])
        tl.store(lse_ptr + partial_rows, m + tl.log2(total_8), mask=valid)


@triton.jit
def merge_kernel(
    partial_ptr, lse_ptr, spans, out_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, DIMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, sequences, HEAD_DIM / DIMS): the outputs of a sequence's items weighted by their share of the
    softmax mass; zeros where there is none."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(spans + sequence * 8 + 5)
    num_items = tl.load(spans + sequence * 8 + 6)
    if PDL:  # started before the decode kernel has ended
        tl.extra.cuda.gdc_wait()
    if num_items == 1:
        return
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    m = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIMS], tl.float32)
    for begin in tl.range(0, num_items, BLOCK):
        split = begin + tl.arange(0, BLOCK)
        inside = split < num_items
        row = (first + split) * NUM_HEADS + head
        lse = tl.load(lse_ptr + row, mask=inside, other=-1e30)
        partial = tl.load(
            partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None], other=0.0
        )
        m_new = tl.maximum(m, lse)
        shrink = tl.exp2(m - m_new)
        weight = tl.where(inside, tl.exp2(lse - m_new), 0.0)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + partial * weight[:, None]
        m = m_new
    weight = tl.exp2(m - tl.max(m, 0))
    out = tl.sum(acc * weight[:, None], 0) / tl.maximum(tl.sum(total * weight, 0), 1e-30)
    row = sequence * NUM_HEADS + head
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))
