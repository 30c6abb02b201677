// Vectors of WEFT_WIDTH floats, the same code for every instruction set: the compiler's own vector types.
// A source that includes this is compiled once for each instruction set, into a library of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#ifndef WEFT_WIDTH
#define WEFT_WIDTH 4
#endif

#define WEFT_EXPORT extern "C" __attribute__((visibility("default")))
#define WEFT_INLINE inline __attribute__((always_inline))

namespace weft {

constexpr int W = WEFT_WIDTH;
typedef float Floats __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

// Vector registers of the instruction set.
constexpr int REGISTERS = WEFT_WIDTH == 16 ? 32 : 16;

// Work below this number of items runs on one thread.
constexpr long SERIAL_ITEMS = 1 << 15;

template <typename Vector>
static WEFT_INLINE Vector load(const void* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename Vector>
static WEFT_INLINE void store(void* to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

// Not `Floats{} + value`: as that turns -0 into 0, compilers keep the addition.
static WEFT_INLINE Floats splat(float value) {
#if WEFT_WIDTH == 16
    return _mm512_set1_ps(value);
#else
    return _mm256_set1_ps(value);
#endif
}

static WEFT_INLINE Floats everywhere(float value) { return splat(value); }

static WEFT_INLINE Floats plus_product(Floats sum, Floats a, Floats b) { return sum + a * b; }

static WEFT_INLINE Floats larger(Floats a, Floats b) {
#if WEFT_WIDTH == 16
    return _mm512_max_ps(a, b);
#else
    return _mm256_max_ps(a, b);
#endif
}

static WEFT_INLINE Floats load_wide(const float* from) { return load<Floats>(from); }

// bfloat16 is the upper half of a float: widening is exact.
static WEFT_INLINE Floats load_wide(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

static WEFT_INLINE float widen(float value) { return value; }

static WEFT_INLINE float widen(uint16_t value) {
    uint32_t word = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

static WEFT_INLINE void store_narrow(float* to, Floats value) { store(to, value); }

// Rounds to the nearest bfloat16, ties to even like torch; NaN stays NaN. Results are in the lower halves of the words.
static WEFT_INLINE Words to_halves(Floats value) {
    Words words = (Words)value, is_nan = (Words)(value != value);
    return (is_nan & 0x7FC0u) | (~is_nan & ((words + 0x7FFFu + ((words >> 16) & 1u)) >> 16));
}

static WEFT_INLINE void store_narrow(uint16_t* to, Floats value) {
    store(to, __builtin_convertvector(to_halves(value), Halves));
}

// The nearest value that an Item can be.
template <typename Item>
static WEFT_INLINE Floats rounded(Floats value) {
    return sizeof(Item) == 2 ? (Floats)(to_halves(value) << 16) : value;
}

static WEFT_INLINE __m128 quarter(Floats value) {
#if WEFT_WIDTH == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
#else
    __m256 half = value;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Sums of four vectors, in less than half the time of four single sums.
static WEFT_INLINE __m128 sums_of_four(Floats a, Floats b, Floats c, Floats d) {
    return _mm_hadd_ps(_mm_hadd_ps(quarter(a), quarter(b)), _mm_hadd_ps(quarter(c), quarter(d)));
}

static WEFT_INLINE float sum(Floats value) { return sums_of_four(value, value, value, value)[0]; }

// Stores the first `count` words of a vector, 1 to W.
static WEFT_INLINE void store_some(void* to, Words value, long count) {
#if WEFT_WIDTH == 16
    _mm512_mask_storeu_epi32(to, __mmask16((1u << count) - 1), (__m512i)value);
#else
    // A copy of a size known only at run time would be a call of the C library.
    if (count & 8) return store(to, value);
    __m128 left = _mm256_castps256_ps128((__m256)value);
    char* at = (char*)to;
    if (count & 4) _mm_storeu_ps((float*)at, left), at += 16, left = _mm256_extractf128_ps((__m256)value, 1);
    if (count & 2) _mm_storel_pi((__m64*)at, left), at += 8, left = _mm_movehl_ps(left, left);
    if (count & 1) _mm_store_ss((float*)at, left);
#endif
}

// Transposes W lines of W words.
static WEFT_INLINE void transpose(Words* lines) {
#if WEFT_WIDTH == 16
    constexpr Words LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (uint32_t step = W / 2; step; step /= 2) {
        // of two lines `step` apart, the lanes that have that bit of the first one, and those without of the other one
        __m512i above = (__m512i)((LANES & step) != 0u ? LANES - step + W : LANES);
        __m512i below = (__m512i)((LANES & step) != 0u ? LANES + W : LANES + step);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & step) continue;
            __m512i a = (__m512i)lines[i], b = (__m512i)lines[i + step];
            lines[i] = (Words)_mm512_permutex2var_epi32(a, above, b);
            lines[i + step] = (Words)_mm512_permutex2var_epi32(a, below, b);
        }
    }
#else
    // Not element by element: compilers then write each of them to memory.
    __m256 pairs[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; i += 2) {
        pairs[i] = _mm256_unpacklo_ps((__m256)lines[i], (__m256)lines[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps((__m256)lines[i], (__m256)lines[i + 1]);
    }
    // Lane by lane: word i of the first and of the last four lines.
    __m256 fours[W];
#pragma GCC unroll 2
    for (int i = 0; i < W; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
        }
#pragma GCC unroll 4
    for (int i = 0; i < W / 2; i++) {
        lines[i] = (Words)_mm256_permute2f128_ps(fours[i], fours[i + W / 2], 0x20);
        lines[i + W / 2] = (Words)_mm256_permute2f128_ps(fours[i], fours[i + W / 2], 0x31);
    }
#endif
}

#ifdef __AVX512BF16__
// Two bfloat16 that are multiplied by two others, with both products added to one float.
#define WEFT_PAIRS
typedef uint32_t __attribute__((may_alias)) Pair;

static WEFT_INLINE Words everywhere(Pair value) { return (Words)_mm512_set1_epi32(int(value)); }

static WEFT_INLINE Floats plus_product(Floats sum, Words a, Floats b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Pairs of the nearest bfloat16; what is smaller than the smallest normal number becomes zero.
static WEFT_INLINE Words pairs_of(Floats first, Floats second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// 2^x within 1e-4, which is below the rounding error of bfloat16.
static WEFT_INLINE Floats rough_power(Floats x) {
    Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, 0), rest = x - whole;
    Floats result = rest * 0.055838283f + 0.242639479f;
    result = result * rest + 0.693136734f;
    result = result * rest + 0.999924557f;
    return (Floats)_mm512_scalef_ps((__m512)result, (__m512)whole);
}

// Pairs of bfloat16 that lie in two rows.
static WEFT_INLINE Words pairs_of(const uint16_t* first, const uint16_t* second) {
    return __builtin_convertvector(load<Halves>(first), Words) |
           (__builtin_convertvector(load<Halves>(second), Words) << 16);
}
#endif

// e^x for x <= 0, within 2 units in the last place; below -87 it stays at 1.6e-38.
static WEFT_INLINE Floats exponential(Floats x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the lowest bits
    Floats shifted = x * 1.44269504f + ROUND;
    Floats whole = shifted - ROUND;
    Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats result = splat(1.9875691500e-4f);
    result = result * rest + 1.3981999507e-3f;
    result = result * rest + 8.3334519073e-3f;
    result = result * rest + 4.1665795894e-2f;
    result = result * rest + 1.6666665459e-1f;
    result = result * rest + 5.0000001201e-1f;
    result = result * rest * rest + rest + 1.0f;
    return (Floats)((Words)result + ((Words)shifted << 23));
}

}  // namespace weft
