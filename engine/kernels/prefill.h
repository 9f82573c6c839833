// Causal attention of a chunk of one sequence in bf16, for CPUs with AVX512-BF16.
//
// All pages of the sequence are packed once per layer into pairs for the dot-product instruction: K pairs
// dims of 16 tokens, V pairs tokens. Then blocks of queries run over tiles of 64 tokens; scores, sums and
// outputs are float32.
#pragma once
#if defined(__AVX512F__) && defined(__GNUC__)
#define KV_BF16_DOT 1
#include <algorithm>
#include <vector>

#include "attention.h"
#include "convert.h"

#define KV_TARGET __attribute__((target("avx512bf16")))

namespace kv {

constexpr int kTokens = 64, kRows = 6, kBlock = 48;  // tokens of a tile, queries of a register tile, of a block

// s[r][t] = q[r] . k[t]
KV_TARGET inline void tile_scores(const uint32_t* q, const uint32_t* k, int pairs, float* s) {
    __m512 acc[kRows][4];
    for (auto& row : acc)
        for (__m512& x : row) x = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
        __m512bh tokens[4];
        for (int i = 0; i < 4; i++) tokens[i] = (__m512bh)_mm512_loadu_si512(k + (i * pairs + p) * 16);
        for (int r = 0; r < kRows; r++) {
            const __m512bh query = (__m512bh)_mm512_set1_epi32(int(q[r * pairs + p]));
            for (int i = 0; i < 4; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], tokens[i], query);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(s + r * kTokens + 16 * i, acc[r][i]);
}

// Scores become bf16 probabilities, 0 from `num_visible` on; returns what older sums must be multiplied with.
KV_TARGET inline float tile_softmax(float* s, int num_visible, float scale, uint32_t* p, float& top, float& mass) {
    F<16> x[4], most = splat<16>(kMasked);
    __mmask16 visible[4];
    for (int i = 0; i < 4; i++) {
        const int count = std::clamp(num_visible - 16 * i, 0, 16);
        visible[i] = __mmask16((1u << count) - 1);
        x[i] = (F<16>)_mm512_mask_mov_ps(_mm512_set1_ps(kMasked), visible[i], __m512(load<16>(s + 16 * i) * scale));
        most = max<16>(x[i], most);
    }
    const float new_top = std::max(top, max_of<16>(most)), keep = exp2<16>(splat<16>(top - new_top))[0];
    F<16> total{};
    for (int i = 0; i < 4; i++) {
        const F<16> e = (F<16>)_mm512_maskz_mov_ps(visible[i], (__m512)exp2<16>(x[i] - new_top));
        total += e + x[i] * 0.0f;  // NaN passes
        _mm256_storeu_si256((__m256i*)(p + 8 * i), (__m256i)_mm512_cvtneps_pbh((__m512)e));
    }
    top = new_top;
    mass = mass * keep + sum<16>(total);
    return keep;
}

// out[r] = out[r] * keep[r] + sum over t of p[r][t] * v[t]
KV_TARGET inline void tile_weigh(const uint32_t* p, const uint32_t* v, const float* keep, int dim, float* out) {
    for (int d = 0; d < dim; d += 64) {
        __m512 acc[kRows][4];
        for (int r = 0; r < kRows; r++)
            for (int i = 0; i < 4; i++)
                acc[r][i] = _mm512_mul_ps(_mm512_loadu_ps(out + r * dim + d + 16 * i), _mm512_set1_ps(keep[r]));
        for (int t = 0; t < kTokens / 2; t++) {
            __m512bh values[4];
            for (int i = 0; i < 4; i++) values[i] = (__m512bh)_mm512_loadu_si512(v + t * dim + d + 16 * i);
            for (int r = 0; r < kRows; r++) {
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(int(p[r * kTokens / 2 + t]));
                for (int i = 0; i < 4; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], values[i], weight);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + r * dim + d + 16 * i, acc[r][i]);
    }
}

struct PrefillCall {
    Layout layout;
    int64_t layer, num_heads, num_new, start, num_threads;
    const uint8_t* pool;
    const bf16* q;  // [T, Hq, D], D a multiple of 64
    bf16* out;
    const PageCells* pages;

    int64_t num_tokens() const { return start + num_new; }
    int64_t num_tiles() const { return (num_tokens() + kTokens - 1) / kTokens; }
    int64_t tile_words() const { return kTokens * layout.head_dim / 2; }

    // One page of one head into `k` and `v`, [tile][4 groups][D / 2][16] and [tile][32][D] pairs.
    void pack(int64_t page, int64_t head, float* values, uint32_t* k, uint32_t* v) const {
        const int64_t dim = layout.head_dim, begin = page * layout.page_size;
        const int64_t tokens = std::min(layout.page_size, num_tokens() - begin);
        float *k_values = values, *v_values = values + layout.head_values();
        with_codec(layout.kinds[pages[page].level], [&](auto codec) {
            using C = decltype(codec);
            decode_head<C>(HeadPage::at<C>(pool, pages[page], layout, layer, head), layout, tokens, k_values, v_values);
        });
        if (tokens % 2) std::fill_n(v_values + tokens * dim, dim, 0.0f);
        alignas(64) bf16 narrow[kMaxDim], odd[kMaxDim];
        for (int64_t t = 0; t < tokens; t++) {
            for (int64_t d = 0; d < dim; d += 16) store<16>(narrow + d, load<16>(k_values + t * dim + d));
            const int64_t at = begin + t;
            uint32_t* to = k + at / 16 * (8 * dim) + at % 16;
            for (int64_t p = 0; p < dim / 2; p++) std::memcpy(to + 16 * p, narrow + 2 * p, 4);
        }
        for (int64_t t = 0; t < tokens; t += 2) {
            for (int64_t d = 0; d < dim; d += 16) {
                store<16>(narrow + d, load<16>(v_values + t * dim + d));
                store<16>(odd + d, load<16>(v_values + (t + 1) * dim + d));
            }
            uint32_t* to = v + (begin + t) / 2 * dim;
            for (int64_t d = 0; d < dim; d++) to[d] = narrow[d].bits | uint32_t(odd[d].bits) << 16;
        }
    }

    // `count` queries from `first` of a kv head, numbered token by token, group by group.
    void attend(int64_t head, int64_t first, int64_t count, const uint32_t* k, const uint32_t* v) const {
        const int64_t dim = layout.head_dim, group = num_heads / layout.num_kv_heads;
        const float scale = 1.4426950408889634f / std::sqrt(float(dim));
        alignas(64) uint32_t query[kBlock * kMaxDim / 2] = {}, p[kRows * kTokens / 2];
        alignas(64) float result[kBlock * kMaxDim], s[kRows * kTokens];
        float top[kBlock], mass[kBlock], keep[kRows];
        std::fill_n(result, kBlock * dim, 0.0f);
        std::fill_n(top, kBlock, kMasked);
        std::fill_n(mass, kBlock, 0.0f);
        auto offset = [&](int64_t i) {
            return ((first + i) / group * num_heads + head * group + (first + i) % group) * dim;
        };
        for (int64_t i = 0; i < count; i++) std::memcpy(query + i * dim / 2, q + offset(i), dim * sizeof(bf16));
        const int64_t last = start + (first + count - 1) / group;
        for (int64_t tile = 0; tile * kTokens <= last; tile++)
            for (int64_t r = 0; r < count; r += kRows) {
                tile_scores(query + r * dim / 2, k + tile * tile_words(), int(dim / 2), s);
                for (int64_t i = 0; i < kRows; i++) {
                    const int64_t visible = start + (first + std::min(r + i, count - 1)) / group + 1 - tile * kTokens;
                    keep[i] = tile_softmax(s + i * kTokens, int(std::clamp<int64_t>(visible, 0, kTokens)), scale,
                                           p + i * kTokens / 2, top[r + i], mass[r + i]);
                }
                tile_weigh(p, v + tile * tile_words(), keep, int(dim), result + r * dim);
            }
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < dim; d += 16)
                store<16>(out + offset(i) + d, load<16>(result + i * dim + d) * (1.0f / mass[i]));
    }

    void run() const {
        thread_local std::vector<uint32_t> packed;
        const int64_t heads = layout.num_kv_heads, words = num_tiles() * tile_words();
        if (int64_t(packed.size()) < 2 * heads * words) packed.resize(2 * heads * words);
        uint32_t *k = packed.data(), *v = k + heads * words;
        const int64_t num_pages = (num_tokens() + layout.page_size - 1) / layout.page_size;
        const int64_t queries = num_new * (num_heads / heads), blocks = (queries + kBlock - 1) / kBlock;
        for (int64_t head = 0; head < heads; head++)  // what follows the last token must be finite
            for (uint32_t* end : {k + (head + 1) * words, v + (head + 1) * words})
                std::fill_n(end - tile_words(), tile_words(), 0u);
#pragma omp parallel num_threads(num_threads)
        {
            std::vector<float> values(2 * layout.head_values());
#pragma omp for
            for (int64_t i = 0; i < num_pages * heads; i++)
                pack(i / heads, i % heads, values.data(), k + i % heads * words, v + i % heads * words);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < blocks * heads; i++) {
                const int64_t head = i % heads, first = i / heads * kBlock;
                attend(head, first, std::min<int64_t>(kBlock, queries - first), k + head * words, v + head * words);
            }
        }
    }
};

}  // namespace kv
#endif
