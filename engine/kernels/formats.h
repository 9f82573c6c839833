// Bytes of pages: see kvpilot/engine/kv/formats.py, which this file follows.
#pragma once
#include "simd.h"

namespace kv {

enum Kind : int64_t { kFP32, kBF16, kInt8, kFP8, kInt4 };  // `KINDS` in cpu.py

struct Layout {  // passed from Python as int64[]
    int64_t num_layers, num_kv_heads, head_dim, page_size;
    int64_t kinds[8];  // by ladder level

    int64_t head_values() const { return page_size * head_dim; }
    int64_t record_bytes() const { return 2 * head_dim + 4 + 4 * page_size; }
};

struct PageCells { int64_t level, payload, scales; };

// Codecs: the bytes of a row, and W dims from j and from j + head_dim / 2 as floats.
template <class T, Kind K> struct PlainCodec {
    static constexpr Kind kind = K;
    static constexpr bool has_row_scales = K == kInt8 || K == kFP8;
    static constexpr float unit = K == kFP8 ? kE4M3Unit : 1.0f;
    static int64_t row_bytes(int64_t dim) { return dim * int64_t(sizeof(T)); }
    template <int W> static KV_INLINE void load_pair(const uint8_t* row, int j, int half_dim, F<W>& a, F<W>& b) {
        a = load<W>((const T*)row + j);
        b = load<W>((const T*)row + half_dim + j);
    }
};
using FP32 = PlainCodec<float, kFP32>;
using BF16 = PlainCodec<bf16, kBF16>;
using Int8 = PlainCodec<int8_t, kInt8>;
using FP8 = PlainCodec<e4m3, kFP8>;
struct Int4 {
    static constexpr Kind kind = kInt4;
    static constexpr bool has_row_scales = false;
    static int64_t row_bytes(int64_t dim) { return dim / 2; }
    template <int W> static KV_INLINE void load_pair(const uint8_t* row, int j, int, F<W>& a, F<W>& b) {
        load_nibbles<W>(row + j, a, b);
    }
};

struct Int4Record {
    const uint8_t* k_scales;
    const int8_t* k_mins;
    const half *k_units, *v_scales, *v_mins;

    Int4Record(const uint8_t* at, const Layout& layout)
        : k_scales(at),
          k_mins((const int8_t*)at + layout.head_dim),
          k_units((const half*)(at + 2 * layout.head_dim)),
          v_scales(k_units + 2),
          v_mins(v_scales + layout.page_size) {}
};

// K, V and scales of one (layer, kv head) of a page.
struct HeadPage {
    const uint8_t *k, *v;
    const half *k_scales, *v_scales;  // int8, fp8
    const uint8_t* record;            // int4

    template <class C> static HeadPage at(const uint8_t* pool, const PageCells& page, const Layout& layout,
                                          int64_t layer, int64_t head) {
        int64_t heads = layout.num_kv_heads, first = layer * 2 * heads + head;
        int64_t block = C::row_bytes(layout.head_dim) * layout.page_size;
        const uint8_t* payload = pool + page.payload;
        const uint8_t* scales = pool + page.scales;
        return {payload + first * block,
                payload + (first + heads) * block,
                (const half*)scales + first * layout.page_size,
                (const half*)scales + (first + heads) * layout.page_size,
                scales + (layer * heads + head) * layout.record_bytes()};
    }
};

template <class Body> KV_INLINE void with_codec(int64_t kind, Body body) {
    switch (kind) {
        case kFP32: return body(FP32{});
        case kBF16: return body(BF16{});
        case kInt8: return body(Int8{});
        case kFP8: return body(FP8{});
        default: return body(Int4{});  // no other kind gets past `page_layout` in cpu.py
    }
}

}  // namespace kv
