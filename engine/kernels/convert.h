// Pages to floats, and floats to pages: the same arithmetic as the codecs in kvpilot/engine/kv/codecs.
#pragma once
#include <vector>

#include "formats.h"

namespace kv {

// K and V of the first `tokens` tokens of one head, as floats [token][dim].
template <class C>
void decode_head(const HeadPage& page, const Layout& layout, int64_t tokens, float* k_out, float* v_out) {
    constexpr int W = 8;
    const int64_t dim = layout.head_dim, half_dim = dim / 2, row_bytes = C::row_bytes(dim);
    const bool is_v[2] = {false, true};
    for (bool v : is_v) {
        for (int64_t t = 0; t < tokens; t++) {
            float* out = (v ? v_out : k_out) + t * dim;
            const uint8_t* row = (v ? page.v : page.k) + t * row_bytes;
            float scale = 1, low = 0;
            if constexpr (C::has_row_scales) scale = to_float((v ? page.v_scales : page.k_scales)[t]) * C::unit;
            for (int64_t j = 0; j < half_dim; j += W) {
                F<W> a, b;
                C::template load_pair<W>(row, int(j), int(half_dim), a, b);
                if constexpr (C::kind == kInt4) {
                    const Int4Record record(page.record, layout);
                    if (v) {
                        scale = to_float(record.v_scales[t]);
                        low = to_float(record.v_mins[t]);
                        a = a * scale + low;
                        b = b * scale + low;
                    } else {
                        scale = to_float(record.k_units[0]);
                        low = to_float(record.k_units[1]);
                        a = a * (load<W>(record.k_scales + j) * scale) + load<W>(record.k_mins + j) * low;
                        b = b * (load<W>(record.k_scales + half_dim + j) * scale) +
                            load<W>(record.k_mins + half_dim + j) * low;
                    }
                } else if constexpr (C::has_row_scales) {
                    a *= scale;
                    b *= scale;
                }
                store<W>(out + j, a);
                store<W>(out + half_dim + j, b);
            }
        }
    }
}

template <class T> struct GatherCall {
    Layout layout;
    int64_t layer, num_tokens, num_threads;
    const uint8_t* pool;
    const PageCells* pages;
    T *k, *v;  // [Hkv, S, D]

    void run() const {
        const int64_t num_pages = (num_tokens + layout.page_size - 1) / layout.page_size;
        const int64_t count = num_pages * layout.num_kv_heads, dim = layout.head_dim;
#pragma omp parallel num_threads(num_threads) if (count > 4)
        {
            std::vector<float> values(2 * layout.head_values());
            float *k_values = values.data(), *v_values = k_values + layout.head_values();
#pragma omp for
            for (int64_t i = 0; i < count; i++) {
                const int64_t page = i / layout.num_kv_heads, head = i % layout.num_kv_heads;
                const int64_t begin = page * layout.page_size;
                const int64_t tokens = num_tokens - begin < layout.page_size ? num_tokens - begin : layout.page_size;
                with_codec(layout.kinds[pages[page].level], [&](auto codec) {
                    using C = decltype(codec);
                    decode_head<C>(HeadPage::at<C>(pool, pages[page], layout, layer, head), layout, tokens, k_values,
                                   v_values);
                });
                const int64_t to = (head * num_tokens + begin) * dim;
                for (int64_t j = 0; j < tokens * dim; j += 8) {
                    store<8>(k + to + j, load<8>(k_values + j));
                    store<8>(v + to + j, load<8>(v_values + j));
                }
            }
        }
    }
};

// ---------------------------------------------------------------- encoding; false: NaN, inf or out of range

KV_INLINE float round_half(float x) { half h; from_float(x, &h); return to_float(h); }
KV_INLINE float half_up(float x) { return round_half(x + std::fabs(x) * 0x1p-11f); }
KV_INLINE float divisor(float x) { return x < 1.17549435e-38f ? 1.17549435e-38f : x; }
KV_INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

template <class T> bool encode_plain(const float* x, int64_t count, uint8_t* out) {
    T* to = (T*)out;
    float check = 0;
    for (int64_t i = 0; i < count; i++) {
        from_float(x[i], to + i);
        check += to_float(to[i]) * 0.0f;
    }
    return check == 0;
}

KV_INLINE uint8_t to_e4m3(float x) {  // |x| <= 448, ties to even
    const float magnitude = std::fabs(x);
    const uint8_t sign = as_bits(x) >> 31 << 7;
    if (magnitude < 0x1p-6f) return sign | uint8_t(std::nearbyint(magnitude * 0x1p9f));
    const uint32_t bits = as_bits(magnitude);
    return sign | uint8_t(((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3));
}

template <bool IsInt8> bool encode_scaled(const float* x, const Layout& layout, uint8_t* codes, half* scales) {
    const float largest = IsInt8 ? 127.0f : 448.0f;
    float check = 0;
    for (int64_t t = 0; t < layout.page_size; t++, x += layout.head_dim, codes += layout.head_dim) {
        float most = 0, bad = 0;
        for (int64_t j = 0; j < layout.head_dim; j++) {
            most = std::fabs(x[j]) > most ? std::fabs(x[j]) : most;
            bad += x[j] * 0.0f;
        }
        from_float(most / largest, scales + t);
        const float scale = to_float(scales[t]);
        check += bad + scale * 0.0f;
        if (!(check == 0)) return false;
        for (int64_t j = 0; j < layout.head_dim; j++) {
            const float code = clamp(x[j] / divisor(scale), -largest, largest);
            codes[j] = IsInt8 ? uint8_t(int8_t(std::nearbyint(code))) : to_e4m3(code);
        }
    }
    return true;
}

KV_INLINE uint8_t code4(float x, float scale, float low) {
    return uint8_t(clamp(std::nearbyint((x - low) / divisor(scale)), 0.0f, 15.0f));
}

inline bool encode_int4(const float* k, const float* v, const Layout& layout, uint8_t* k_codes, uint8_t* v_codes,
                        uint8_t* record) {
    const int64_t dim = layout.head_dim, half_dim = dim / 2, tokens = layout.page_size;
    uint8_t* k_scales = record;
    int8_t* k_mins = (int8_t*)record + dim;
    half *units = (half*)(record + 2 * dim), *v_scales = units + 2, *v_mins = v_scales + tokens;
    std::vector<float> low(k, k + dim), high(k, k + dim), scale(dim);
    float bad = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < dim; j++) {
            const float x = k[t * dim + j];
            low[j] = x < low[j] ? x : low[j];
            high[j] = x > high[j] ? x : high[j];
            bad += x * 0.0f + v[t * dim + j] * 0.0f;
        }
    if (!(bad == 0)) return false;
    float most = 0;
    for (float x : low) most = std::fabs(x) > most ? std::fabs(x) : most;
    const float min_unit = half_up(most / 127);
    most = 0;
    for (int64_t j = 0; j < dim; j++) {
        k_mins[j] = int8_t(clamp(std::floor(low[j] / divisor(min_unit)), -127, 127));
        low[j] = k_mins[j] * min_unit;
        scale[j] = high[j] - low[j] > 0 ? (high[j] - low[j]) / 15 : 0;
        most = scale[j] > most ? scale[j] : most;
    }
    const float scale_unit = half_up(most / 255);
    from_float(scale_unit, units);
    from_float(min_unit, units + 1);
    if (!((scale_unit + min_unit) * 0.0f == 0)) return false;
    for (int64_t j = 0; j < dim; j++) {
        k_scales[j] = uint8_t(clamp(std::ceil(scale[j] / divisor(scale_unit)), 0, 255));
        scale[j] = k_scales[j] * scale_unit;
    }
    for (int64_t t = 0; t < tokens; t++) {
        const float *x = k + t * dim, *y = v + t * dim;
        float v_low = y[0], v_high = y[0];
        for (int64_t j = 0; j < dim; j++) {
            v_low = y[j] < v_low ? y[j] : v_low;
            v_high = y[j] > v_high ? y[j] : v_high;
        }
        v_low = -half_up(-v_low);
        const float v_scale = half_up((v_high - v_low) / 15);
        from_float(v_low, v_mins + t);
        from_float(v_scale, v_scales + t);
        if (!((v_low + v_scale) * 0.0f == 0)) return false;
        for (int64_t j = 0; j < half_dim; j++) {
            const int64_t h = j + half_dim;
            k_codes[t * half_dim + j] = code4(x[j], scale[j], low[j]) | code4(x[h], scale[h], low[h]) << 4;
            v_codes[t * half_dim + j] = code4(y[j], v_scale, v_low) | code4(y[h], v_scale, v_low) << 4;
        }
    }
    return true;
}

template <class C>
bool encode_head(const float* k, const float* v, const Layout& layout, const HeadPage& page) {
    uint8_t *k_codes = (uint8_t*)page.k, *v_codes = (uint8_t*)page.v;
    const int64_t count = layout.head_values();
    if constexpr (C::kind == kFP32)
        return encode_plain<float>(k, count, k_codes) && encode_plain<float>(v, count, v_codes);
    if constexpr (C::kind == kBF16)
        return encode_plain<bf16>(k, count, k_codes) && encode_plain<bf16>(v, count, v_codes);
    if constexpr (C::has_row_scales)
        return encode_scaled<C::kind == kInt8>(k, layout, k_codes, (half*)page.k_scales) &&
               encode_scaled<C::kind == kInt8>(v, layout, v_codes, (half*)page.v_scales);
    if constexpr (C::kind == kInt4) return encode_int4(k, v, layout, k_codes, v_codes, (uint8_t*)page.record);
}

// Re-encodes a whole page; false if a value cannot be encoded (the target is then unfinished).
inline bool convert_page(const Layout& layout, uint8_t* pool, const PageCells& from, const PageCells& to, int threads) {
    const int64_t count = layout.num_layers * layout.num_kv_heads;
    bool is_fine = true;
#pragma omp parallel num_threads(threads) reduction(&& : is_fine)
    {
        std::vector<float> values(2 * layout.head_values());
        float *k = values.data(), *v = k + layout.head_values();
#pragma omp for
        for (int64_t i = 0; i < count; i++) {
            const int64_t layer = i / layout.num_kv_heads, head = i % layout.num_kv_heads;
            with_codec(layout.kinds[from.level], [&](auto codec) {
                using C = decltype(codec);
                decode_head<C>(HeadPage::at<C>(pool, from, layout, layer, head), layout, layout.page_size, k, v);
            });
            with_codec(layout.kinds[to.level], [&](auto codec) {
                using C = decltype(codec);
                is_fine = encode_head<C>(k, v, layout, HeadPage::at<C>(pool, to, layout, layer, head)) && is_fine;
            });
        }
    }
    return is_fine;
}

}  // namespace kv
