// Vectors of W floats, and loads and stores of every storage type as floats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KV_INLINE inline __attribute__((always_inline))

namespace kv {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif

template <int W> struct Vectors {
    typedef float F __attribute__((vector_size(4 * W)));
    typedef int32_t I __attribute__((vector_size(4 * W)));
};
template <int W> using F = typename Vectors<W>::F;
template <int W> using I = typename Vectors<W>::I;

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // loads give value / 256, see kE4M3Unit
constexpr float kE4M3Unit = 256.0f;

// ---------------------------------------------------------------- scalars

KV_INLINE float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
KV_INLINE uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

KV_INLINE float to_float(float x) { return x; }
KV_INLINE float to_float(int8_t x) { return x; }
KV_INLINE float to_float(uint8_t x) { return x; }
KV_INLINE float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
KV_INLINE void from_float(float x, float* out) { *out = x; }
KV_INLINE void from_float(float x, bf16* out) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out->bits = uint16_t(x == x ? rounded : 0x7fc0);
}
#if defined(__F16C__)
KV_INLINE float to_float(half x) { return _cvtsh_ss(x.bits); }
KV_INLINE void from_float(float x, half* out) { out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
KV_INLINE float to_float(half x) { __fp16 h; std::memcpy(&h, &x, 2); return h; }
KV_INLINE void from_float(float x, half* out) { __fp16 h = x; std::memcpy(out, &h, 2); }
#else
#error "no conversion from and to fp16 on this machine: kvpilot uses torch operations"
#endif
KV_INLINE float to_float(e4m3 x) {
    return to_float(half{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}

// ---------------------------------------------------------------- vectors

template <int W> KV_INLINE F<W> splat(float x) { return x - F<W>{}; }

template <int W> KV_INLINE F<W> load(const float* p) { F<W> x; std::memcpy(&x, p, sizeof x); return x; }

template <int W, class T> KV_INLINE F<W> load(const T* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) {
        if constexpr (sizeof(T) == 2) {
            __m256i raw = _mm256_loadu_si256((const __m256i*)p);
            if constexpr (std::is_same_v<T, half>) return (F<W>)_mm512_cvtph_ps(raw);
            else return (F<W>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
        } else {
            __m128i raw = _mm_loadu_si128((const __m128i*)p);
            if constexpr (std::is_same_v<T, int8_t>) return (F<W>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
            if constexpr (std::is_same_v<T, uint8_t>) return (F<W>)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw));
            if constexpr (std::is_same_v<T, e4m3>) {
                __m256i wide = _mm256_cvtepu8_epi16(raw);
                __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
                __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
                return (F<W>)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
            }
        }
    }
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) {
        if constexpr (sizeof(T) == 2) {
            __m128i raw = _mm_loadu_si128((const __m128i*)p);
            if constexpr (std::is_same_v<T, half>) return (F<W>)_mm256_cvtph_ps(raw);
            else return (F<W>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
        } else {
            __m128i raw = _mm_loadl_epi64((const __m128i*)p);
            if constexpr (std::is_same_v<T, int8_t>) return (F<W>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
            if constexpr (std::is_same_v<T, uint8_t>) return (F<W>)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw));
            if constexpr (std::is_same_v<T, e4m3>) {
                __m128i wide = _mm_cvtepu8_epi16(raw);
                __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
                __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
                return (F<W>)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
            }
        }
    }
#endif
    F<W> x;
    for (int i = 0; i < W; i++) x[i] = to_float(p[i]);
    return x;
}

// The low and high halves of W bytes as floats 0..15.
template <int W> KV_INLINE void load_nibbles(const uint8_t* p, F<W>& low, F<W>& high) {
#if defined(__AVX512F__)
    if constexpr (W == 16) {  // a table look-up ignores all but the lowest 4 bits of an index
        const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
        low = (F<W>)_mm512_permutexvar_ps(index, table);
        high = (F<W>)_mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table);
        return;
    }
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) {
        __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
        low = (F<W>)_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
        high = (F<W>)_mm256_cvtepi32_ps(_mm256_srli_epi32(codes, 4));
        return;
    }
#endif
    for (int i = 0; i < W; i++) {
        low[i] = float(p[i] & 15);
        high[i] = float(p[i] >> 4);
    }
}

template <int W> KV_INLINE void store(float* p, F<W> x) { std::memcpy(p, &x, sizeof x); }

template <int W> KV_INLINE void store(bf16* p, F<W> x) {
    I<W> bits = (I<W>)x;
    I<W> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = x == x ? rounded : I<W>{} + 0x7fc0;
#if defined(__AVX512F__)
    if constexpr (W == 16) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
        return;
    }
#endif
    for (int i = 0; i < W; i++) p[i].bits = uint16_t(rounded[i]);
}

template <int W> KV_INLINE F<W> max(F<W> a, F<W> b) { return a > b ? a : b; }

// Lane i of x moved to lane i ^ H.
template <int W, int H> KV_INLINE F<W> exchange(F<W> x) {
    I<W> other;
    for (int i = 0; i < W; i++) other[i] = i ^ H;
    return __builtin_shuffle(x, other);
}

template <int W, int H = W / 2> KV_INLINE float sum(F<W> x) {
    x += exchange<W, H>(x);
    if constexpr (H > 1) return sum<W, H / 2>(x);
    else return x[0];
}

template <int W, int H = W / 2> KV_INLINE float max_of(F<W> x) {
    x = max<W>(x, exchange<W, H>(x));
    if constexpr (H > 1) return max_of<W, H / 2>(x);
    else return x[0];
}

// 2^x for x <= 127, relative error below 2e-7; what is below 2^-126 becomes 2^-126. NaN gives garbage.
template <int W> KV_INLINE F<W> exp2(F<W> x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x < -126.0f ? splat<W>(-126.0f) : x;
    F<W> shifted = x + shift;
    I<W> exponent = ((I<W>)shifted - int32_t(0x4b400000)) << 23;
    F<W> f = x - (shifted - shift);
    F<W> y = f * 1.5403530e-4f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    return (F<W>)((I<W>)y + exponent);
}

// Lane i of the result: bit H of i clear ? a[i] + a[i ^ H] : b[i] + b[i ^ H].
template <int W, int H> KV_INLINE F<W> fold(F<W> a, F<W> b) {
    I<W> lane, other;
    for (int i = 0; i < W; i++) {
        lane[i] = i & H ? W + i : i;
        other[i] = i & H ? W + (i ^ H) : i ^ H;
    }
    return __builtin_shuffle(a, b, lane) + __builtin_shuffle(a, b, other);
}

// Lane i of the result is the sum of rows[i]; the rows are overwritten.
template <int W, int H = W / 2> KV_INLINE F<W> sum_rows(F<W>* rows) {
    for (int i = 0; i < H; i++) rows[i] = fold<W, H>(rows[i], rows[i + H]);
    if constexpr (H > 1) return sum_rows<W, H / 2>(rows);
    else return rows[0];
}

}  // namespace kv
