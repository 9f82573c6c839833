// Decode attention over pages of mixed precision, straight from their codes.
//
// Scales never touch the tiles: K scales of int8 and fp8 multiply the scores and their V scales the
// probabilities; int4 folds its K channel scales into the query, once per page, and its mins into scalars.
// Scores are in units of log2, so that the softmax needs exp2 only.
#pragma once
#include <algorithm>
#include <vector>

#include "formats.h"

namespace kv {

constexpr int kMaxDim = 256, kMaxPage = 256, kMaxGroup = 16, kTile = 4;  // kTile queries share each load
constexpr float kMasked = -1e30f;

// Caches are told of the next block while this one is computed: row by row, or the loads would queue behind it.
KV_INLINE void prefetch(const uint8_t* p, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i);
}

// Running softmax of the queries that share a kv head.
struct Softmax {
    float top[kMaxGroup], mass[kMaxGroup];  // largest score, sum of exp2(score - top)
    float shift[kMaxGroup];                 // what every element of `out` still lacks (V mins of int4)
    float out[kMaxGroup * kMaxDim];         // [group][dim], not divided by mass
};

// s[g][t] = q[g] . k[t] for a tile of G queries. D is the head_dim if known at compile time, else 0.
template <class C, int W, int D, int G>
void scores(const uint8_t* k, const uint8_t* next_k, int num_tokens, const float* q, int head_dim, float* s,
            int s_stride) {
    const int dim = D ? D : head_dim, half_dim = dim / 2;
    const int64_t row_bytes = C::row_bytes(dim);
    for (int t0 = 0; t0 < num_tokens; t0 += W) {
        F<W> rows[G][W];
        const int count = std::min(W, num_tokens - t0);
        for (int t = 0; t < count; t++) {
            prefetch(next_k + (t0 + t) * row_bytes, row_bytes);
            F<W> acc[G] = {};
            for (int j = 0; j < half_dim; j += W) {
                F<W> a, b;
                C::template load_pair<W>(k + (t0 + t) * row_bytes, j, half_dim, a, b);
                for (int g = 0; g < G; g++) {
                    acc[g] += a * load<W>(q + g * dim + j);
                    acc[g] += b * load<W>(q + g * dim + half_dim + j);
                }
            }
            for (int g = 0; g < G; g++) rows[g][t] = acc[g];
        }
        for (int t = count; t < W; t++)
            for (int g = 0; g < G; g++) rows[g][t] = F<W>{};
        for (int g = 0; g < G; g++) store<W>(s + g * s_stride + t0, sum_rows<W>(rows[g]));
    }
}

// out[g] = out[g] * keep[g] + sum over t of p[g][t] * v[t] for a tile of G queries.
template <class C, int W, int D, int G>
void weigh(const uint8_t* v, const uint8_t* next_v, int num_tokens, const float* p, int p_stride,
           const float* keep, int head_dim, float* out) {
    const int dim = D ? D : head_dim, half_dim = dim / 2;
    const int64_t row_bytes = C::row_bytes(dim);
    for (int j = 0; j < half_dim; j += W) {
        F<W> lower[G], upper[G];
        for (int g = 0; g < G; g++) {
            lower[g] = load<W>(out + g * dim + j) * keep[g];
            upper[g] = load<W>(out + g * dim + half_dim + j) * keep[g];
        }
        for (int t = 0; t < num_tokens; t++) {
            if (j == 0) prefetch(next_v + t * row_bytes, row_bytes);
            F<W> a, b;
            C::template load_pair<W>(v + t * row_bytes, j, half_dim, a, b);
            for (int g = 0; g < G; g++) {
                lower[g] += a * p[g * p_stride + t];
                upper[g] += b * p[g * p_stride + t];
            }
        }
        for (int g = 0; g < G; g++) {
            store<W>(out + g * dim + j, lower[g]);
            store<W>(out + g * dim + half_dim + j, upper[g]);
        }
    }
}

// Scales of `num_tokens` tokens as floats, zero up to the next multiple of W.
template <int W> KV_INLINE void load_scales(const half* from, int num_tokens, float unit, float* to) {
    int t = 0;
    for (; t + W <= num_tokens; t += W) store<W>(to + t, load<W>(from + t) * unit);
    if (t == num_tokens) return;
    store<W>(to + t, F<W>{});
    for (; t < num_tokens; t++) to[t] = to_float(from[t]) * unit;
}

// row *= factors; num_tokens is rounded up to a multiple of W, as in `load_scales`.
template <int W> KV_INLINE void multiply(float* row, const float* factors, int num_tokens) {
    for (int t = 0; t < num_tokens; t += W) store<W>(row + t, load<W>(row + t) * load<W>(factors + t));
}

template <int W> KV_INLINE float dot(const float* a, const float* b, int num_tokens) {
    F<W> total{};
    for (int t = 0; t < num_tokens; t += W) total += load<W>(a + t) * load<W>(b + t);
    return sum<W>(total);
}

// Queries times the K channel scales of an int4 page; `bias` gets their product with the channel mins.
template <int W>
void fold_channels(const Int4Record& record, const float* q, int group, int dim, float* folded, float* bias) {
    const float scale_unit = to_float(record.k_units[0]), min_unit = to_float(record.k_units[1]);
    F<W> total[kMaxGroup] = {};
    for (int j = 0; j < dim; j += W) {
        F<W> scale = load<W>(record.k_scales + j) * scale_unit, low = load<W>(record.k_mins + j) * min_unit;
        for (int g = 0; g < group; g++) {
            F<W> x = load<W>(q + g * dim + j);
            store<W>(folded + g * dim + j, x * scale);
            total[g] += x * low;
        }
    }
    for (int g = 0; g < group; g++) bias[g] = sum<W>(total[g]);
}

// Scores become probabilities relative to the new top; returns what older sums must be multiplied with.
template <int W> float advance(float* s, int num_tokens, float& top, float& mass) {
    F<W> most = splat<W>(kMasked);
    for (int t = 0; t < num_tokens; t += W) most = max<W>(load<W>(s + t), most);
    const float new_top = std::max(top, max_of<W>(most)), keep = exp2<W>(splat<W>(top - new_top))[0];
    F<W> total{};
    for (int t = 0; t < num_tokens; t += W) {
        F<W> score = load<W>(s + t), p = exp2<W>(score - new_top);
        store<W>(s + t, p);
        total += p + score * 0.0f;  // NaN passes
    }
    top = new_top;
    mass = mass * keep + sum<W>(total);
    return keep;
}

template <class C, int W, int D>
void attend_page(const HeadPage& page, const HeadPage& next, int num_tokens, const float* q, int group,
                 const Layout& layout, Softmax& state) {
    const int dim = D ? D : int(layout.head_dim), stride = kMaxPage;
    const int padded = (num_tokens + W - 1) / W * W;
    alignas(64) float s[kMaxGroup * kMaxPage], keep[kMaxGroup], bias[kMaxGroup] = {};
    alignas(64) float folded[C::kind == kInt4 ? kMaxGroup * kMaxDim : 1];
    alignas(64) float v_scales[kMaxPage], v_mins[kMaxPage], k_scales[kMaxPage];
    if constexpr (C::kind == kInt4) {
        const Int4Record record(page.record, layout);
        fold_channels<W>(record, q, group, dim, folded, bias);
        load_scales<W>(record.v_scales, num_tokens, 1.0f, v_scales);
        load_scales<W>(record.v_mins, num_tokens, 1.0f, v_mins);
        q = folded;
    }
    if constexpr (C::has_row_scales) {
        load_scales<W>(page.k_scales, num_tokens, C::unit, k_scales);
        load_scales<W>(page.v_scales, num_tokens, C::unit, v_scales);
    }
    for (int g = 0; g < group; g += kTile) {
        const float* tile_q = q + g * dim;
        float* tile_s = s + g * stride;
        switch (std::min(kTile, group - g)) {
            case 1: scores<C, W, D, 1>(page.k, next.k, num_tokens, tile_q, dim, tile_s, stride); break;
            case 2: scores<C, W, D, 2>(page.k, next.k, num_tokens, tile_q, dim, tile_s, stride); break;
            case 3: scores<C, W, D, 3>(page.k, next.k, num_tokens, tile_q, dim, tile_s, stride); break;
            default: scores<C, W, D, 4>(page.k, next.k, num_tokens, tile_q, dim, tile_s, stride);
        }
    }
    for (int g = 0; g < group; g++) {
        float* row = s + g * stride;
        if constexpr (C::has_row_scales) multiply<W>(row, k_scales, num_tokens);
        if constexpr (C::kind == kInt4)
            for (int t = 0; t < num_tokens; t += W) store<W>(row + t, load<W>(row + t) + bias[g]);
        for (int t = num_tokens; t < padded; t++) row[t] = kMasked;
        keep[g] = advance<W>(row, num_tokens, state.top[g], state.mass[g]);
        state.shift[g] *= keep[g];
        if constexpr (C::kind == kInt4) state.shift[g] += dot<W>(row, v_mins, num_tokens);
        if constexpr (C::has_row_scales || C::kind == kInt4) multiply<W>(row, v_scales, num_tokens);
    }
    for (int g = 0; g < group; g += kTile) {
        const float* tile_p = s + g * stride;
        float* tile_out = state.out + g * dim;
        switch (std::min(kTile, group - g)) {
            case 1: weigh<C, W, D, 1>(page.v, next.v, num_tokens, tile_p, stride, keep + g, dim, tile_out); break;
            case 2: weigh<C, W, D, 2>(page.v, next.v, num_tokens, tile_p, stride, keep + g, dim, tile_out); break;
            case 3: weigh<C, W, D, 3>(page.v, next.v, num_tokens, tile_p, stride, keep + g, dim, tile_out); break;
            default: weigh<C, W, D, 4>(page.v, next.v, num_tokens, tile_p, stride, keep + g, dim, tile_out);
        }
    }
}

// Some of the pages of one sequence, for one kv head.
struct Work {
    int sequence;
    int64_t first_page, end_page;
    int part, num_parts;
};

template <class T> struct DecodeCall {
    Layout layout;
    int64_t layer, num_heads, num_sequences, num_threads;
    const uint8_t* pool;
    const T* q;  // [B, Hq, D]
    T* out;
    const PageCells* pages;
    const int64_t *indptr, *num_tokens;

    int group() const { return int(num_heads / layout.num_kv_heads); }
    const T* queries(int sequence, int64_t head) const {
        return q + (sequence * num_heads + head * group()) * layout.head_dim;
    }
    T* outputs(int sequence, int64_t head) const {
        return out + (sequence * num_heads + head * group()) * layout.head_dim;
    }

    // Long sequences are cut so that every thread gets several pieces of similar size.
    void divide(std::vector<Work>& work) const {
        const int64_t pieces = 4 * num_threads, total = indptr[num_sequences] * layout.num_kv_heads;
        const int64_t pages_per_piece = std::max<int64_t>(2, (total + pieces - 1) / pieces);
        work.clear();
        for (int b = 0; b < num_sequences; b++) {
            const int64_t first = indptr[b], count = indptr[b + 1] - first;
            const int parts = num_threads == 1 ? 1 : int((count + pages_per_piece - 1) / pages_per_piece);
            for (int i = 0; i < parts; i++)
                work.push_back({b, first + count * i / parts, first + count * (i + 1) / parts, i, parts});
        }
    }

    // A block to be read soon; its scales are fetched at once.
    HeadPage next_block(const PageCells& page, int64_t head) const {
        HeadPage next;
        with_codec(layout.kinds[page.level], [&](auto codec) {
            using C = decltype(codec);
            next = HeadPage::at<C>(pool, page, layout, layer, head);
            if constexpr (C::has_row_scales) {
                prefetch((const uint8_t*)next.k_scales, 2 * layout.page_size);
                prefetch((const uint8_t*)next.v_scales, 2 * layout.page_size);
            }
            if constexpr (C::kind == kInt4) prefetch(next.record, layout.record_bytes());
        });
        return next;
    }

    // `after` is what this thread is likely to read next.
    void attend(const Work& work, int64_t head, const HeadPage& after, Softmax& state) const {
        const int dim = int(layout.head_dim), count = group() * dim;
        alignas(64) float query[kMaxGroup * kMaxDim];
        const T* from = queries(work.sequence, head);
        const float scale = 1.4426950408889634f / std::sqrt(float(dim));
        for (int i = 0; i < count; i++) query[i] = to_float(from[i]) * scale;
        for (int g = 0; g < group(); g++) {
            state.top[g] = kMasked;
            state.mass[g] = state.shift[g] = 0;
        }
        std::fill_n(state.out, count, 0.0f);
        for (int64_t i = work.first_page; i < work.end_page; i++) {
            const int64_t before = (i - indptr[work.sequence]) * layout.page_size;
            const int tokens = int(std::min(layout.page_size, num_tokens[work.sequence] - before));
            with_codec(layout.kinds[pages[i].level], [&](auto codec) {
                using C = decltype(codec);
                const HeadPage page = HeadPage::at<C>(pool, pages[i], layout, layer, head);
                const HeadPage next = i + 1 < work.end_page ? next_block(pages[i + 1], head) : after;
                if (dim == 64) attend_page<C, kWidth, 64>(page, next, tokens, query, group(), layout, state);
                else if (dim == 128) attend_page<C, kWidth, 128>(page, next, tokens, query, group(), layout, state);
                else attend_page<C, 8, 0>(page, next, tokens, query, group(), layout, state);
            });
        }
    }

    void write(const Softmax& state, int sequence, int64_t head) const {
        const int dim = int(layout.head_dim);
        T* to = outputs(sequence, head);
        for (int g = 0; g < group(); g++) {
            const float share = 1.0f / state.mass[g];
            for (int j = 0; j < dim; j++)
                from_float((state.out[g * dim + j] + state.shift[g]) * share, to + g * dim + j);
        }
    }

    // Merges `num_parts` states of one sequence and head into the first.
    void merge(Softmax* const* parts, int num_parts) const {
        const int dim = int(layout.head_dim);
        Softmax& first = *parts[0];
        for (int g = 0; g < group(); g++) {
            float top = first.top[g];
            for (int i = 1; i < num_parts; i++) top = std::max(top, parts[i]->top[g]);
            for (int i = 0; i < num_parts; i++) {
                const float factor = std::exp2(parts[i]->top[g] - top);
                const float* from = parts[i]->out + g * dim;
                float* to = first.out + g * dim;
                first.mass[g] = (i ? first.mass[g] : 0) + parts[i]->mass[g] * factor;
                first.shift[g] = (i ? first.shift[g] : 0) + parts[i]->shift[g] * factor;
                for (int j = 0; j < dim; j++) to[j] = (i ? to[j] : 0) + from[j] * factor;
            }
        }
    }

    void run() const {
        thread_local std::vector<Work> work_of_thread;
        thread_local std::vector<Softmax> states_of_thread;
        divide(work_of_thread);
        const std::vector<Work>& work = work_of_thread;
        const int64_t heads = layout.num_kv_heads, count = int64_t(work.size()) * heads;
        const bool is_cut = int64_t(work.size()) > num_sequences;
        if (is_cut && int64_t(states_of_thread.size()) < count) states_of_thread.resize(count);
        Softmax* states = states_of_thread.data();
#pragma omp parallel num_threads(num_threads) if (count > 1)
        {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; i++) {
                const Work& piece = work[i / heads];
                const int64_t next = std::min(i + num_threads, count - 1);
                const HeadPage after = next_block(pages[work[next / heads].first_page], next % heads);
                if (piece.num_parts > 1) {
                    attend(piece, i % heads, after, states[i]);
                } else {
                    Softmax state;
                    attend(piece, i % heads, after, state);
                    write(state, piece.sequence, i % heads);
                }
            }
            if (is_cut) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < count; i++) {
                    const Work& piece = work[i / heads];
                    if (piece.part > 0 || piece.num_parts == 1) continue;
                    std::vector<Softmax*> parts;
                    for (int n = 0; n < piece.num_parts; n++) parts.push_back(states + i + n * heads);
                    merge(parts.data(), piece.num_parts);
                    write(states[i], piece.sequence, i % heads);
                }
            }
        }
    }
};

}  // namespace kv
