// Norms, activation, and what happens to q, k and v before attention.
#pragma once
#include "formats.h"

namespace kv {

constexpr int64_t kParallelValues = 16384;  // below, waking threads costs more than it saves

template <class X, class Y> void rms_norm(const X* x, const Y* weight, Y* out, int64_t tokens, int64_t hidden,
                                          float eps, int threads) {
    constexpr int W = kWidth;
    const int64_t whole = hidden / W * W;
#pragma omp parallel for num_threads(threads) if (tokens > 1 && tokens * hidden >= kParallelValues)
    for (int64_t t = 0; t < tokens; t++) {
        const X* row = x + t * hidden;
        Y* to = out + t * hidden;
        F<W> squares{};
        for (int64_t i = 0; i < whole; i += W) squares += load<W>(row + i) * load<W>(row + i);
        float total = sum<W>(squares);
        for (int64_t i = whole; i < hidden; i++) total += to_float(row[i]) * to_float(row[i]);
        const float factor = 1.0f / std::sqrt(total / float(hidden) + eps);
        for (int64_t i = 0; i < whole; i += W)
            store<W>(to + i, load<W>(row + i) * factor * load<W>(weight + i));
        for (int64_t i = whole; i < hidden; i++) from_float(to_float(row[i]) * factor * to_float(weight[i]), to + i);
    }
}

template <class X, class R> void add_to(const X* x, R* residual, int64_t count) {
    constexpr int W = kWidth;
    const int64_t whole = count / W * W;
    for (int64_t i = 0; i < whole; i += W) store<W>(residual + i, load<W>(residual + i) + load<W>(x + i));
    for (int64_t i = whole; i < count; i++) from_float(to_float(residual[i]) + to_float(x[i]), residual + i);
}

template <class T> void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t inner, int threads) {
    constexpr int W = kWidth;
    const int64_t whole = inner / W * W;
    const float log2e = 1.4426950408889634f;
#pragma omp parallel for num_threads(threads) if (tokens > 1 && tokens * inner >= kParallelValues)
    for (int64_t t = 0; t < tokens; t++) {
        const T *gate = gate_up + t * 2 * inner, *up = gate + inner;
        T* to = out + t * inner;
        for (int64_t i = 0; i < whole; i += W) {
            const F<W> x = load<W>(gate + i), y = x * -log2e;
            const F<W> bounded = y > 126.0f ? splat<W>(126.0f) : y;
            const F<W> nan = x * 0.0f;  // NaN passes
            store<W>(to + i, x / (1.0f + exp2<W>(bounded) + nan) * load<W>(up + i));
        }
        for (int64_t i = whole; i < inner; i++) {
            const float x = to_float(gate[i]);
            from_float(x / (1.0f + std::exp(-x)) * to_float(up[i]), to + i);
        }
    }
}

// Butterflies between lanes that differ in one bit: H, H / 2, .. 1.
template <int W, int H = W / 2> KV_INLINE F<W> hadamard_lanes(F<W> x) {
    F<W> sign;
    for (int lane = 0; lane < W; lane++) sign[lane] = lane & H ? -1.0f : 1.0f;
    x = x * sign + exchange<W, H>(x);
    if constexpr (H > 1) return hadamard_lanes<W, H / 2>(x);
    else return x;
}

// x * H / sqrt(dim) for a power of two `dim` >= W.
template <int W> void hadamard(float* x, int dim) {
    for (int h = W; h < dim; h *= 2)
        for (int i = 0; i < dim; i += 2 * h)
            for (int j = i; j < i + h; j += W) {
                const F<W> a = load<W>(x + j), b = load<W>(x + j + h);
                store<W>(x + j, a + b);
                store<W>(x + j + h, a - b);
            }
    const float norm = 1.0f / std::sqrt(float(dim));
    for (int i = 0; i < dim; i += W) store<W>(x + i, hadamard_lanes<W>(load<W>(x + i) * norm));
}

template <class T, class S> struct WriteCall {
    Layout layout;
    int64_t layer, num_heads, num_tokens, num_threads;
    bool is_rotated;  // K and Q go into the Hadamard basis
    uint8_t* pool;
    const T* qkv;  // [T, Hq + 2 Hkv, D]
    T* q;          // [T, Hq, D]
    const int64_t *positions, *places;  // [T], [T, 2]
    const float *cos, *sin;             // [max_position, D / 2]

    void run() const {
        const int64_t heads = num_heads + 2 * layout.num_kv_heads, count = num_tokens * heads;
#pragma omp parallel for num_threads(num_threads) if (count * layout.head_dim >= kParallelValues)
        for (int64_t i = 0; i < count; i++) row(i / heads, i % heads, qkv + i * layout.head_dim);
    }

    void row(int64_t token, int64_t head, const T* from) const {
        constexpr int W = 8;  // head_dim / 2 is a multiple of it
        const int64_t dim = layout.head_dim, half_dim = dim / 2, kv_heads = layout.num_kv_heads;
        alignas(64) float x[512];
        if (head >= num_heads + kv_heads) {
            for (int64_t j = 0; j < dim; j += W) store<W>(x + j, load<W>(from + j));
        } else {
            const float *c = cos + positions[token] * half_dim, *s = sin + positions[token] * half_dim;
            for (int64_t j = 0; j < half_dim; j += W) {
                const F<W> a = load<W>(from + j), b = load<W>(from + half_dim + j);
                const F<W> cosine = load<W>(c + j), sine = load<W>(s + j);
                store<W>(x + j, a * cosine - b * sine);
                store<W>(x + half_dim + j, b * cosine + a * sine);
            }
            if (is_rotated) hadamard<kWidth>(x, int(dim));
        }
        if (head < num_heads) {
            T* to = q + (token * num_heads + head) * dim;
            for (int64_t j = 0; j < dim; j += W) store<W>(to + j, load<W>(x + j));
        } else {  // K heads, then V heads, as in the page
            S* page = (S*)(pool + places[2 * token]);
            const int64_t index = layer * 2 * kv_heads + head - num_heads;
            S* to = page + index * layout.head_values() + places[2 * token + 1] * dim;
            for (int64_t j = 0; j < dim; j += W) store<W>(to + j, load<W>(x + j));
        }
    }
};

}  // namespace kv
