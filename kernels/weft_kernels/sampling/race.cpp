// The race between the tokens of a row: the sum of score and noise is largest for the sampled token.
// `weft_kernels.sampling.noise` defines the noise; every sum and product here rounds as there.

#include "../native/vector.h"

#include <algorithm>
#include <limits>

using namespace weft;

namespace {

typedef int32_t Ints __attribute__((vector_size(4 * W)));

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr uint32_t PHILOX_MULTIPLIER = 0xD256D193, PHILOX_INCREMENT = 0x9E3779B9;
constexpr int NUM_ROUNDS = 10;
constexpr float LN_2 = 0.69314718f;
constexpr uint32_t ROOT_HALF_BITS = 0x3F3504F3;
constexpr float LN_TERMS[] = {-0.49999982f, 0.33333933f,  -0.25002584f, 0.19963478f,
                              -0.16551788f, 0.14883684f, -0.1442688f,  0.08979528f};
// The largest variate is 33.97.
constexpr float MAX_NOISE = 34.0f;

struct Row {
    float temperature, floor;
    uint32_t key, counter;
};

// A product that no addition absorbs: a fused sum would differ from that of other devices.
WEFT_INLINE Floats product(Floats a, Floats b) {
    Floats value = a * b;
    asm("" : "+v"(value));
    return value;
}

WEFT_INLINE Floats product(Floats a, float b) { return product(a, splat(b)); }

WEFT_INLINE Floats floats_of(Words words) { return __builtin_convertvector((Ints)words, Floats); }

// The lanes of a comparison that hold, as bits.
WEFT_INLINE uint32_t lanes_of(Words mask) {
#if WEFT_WIDTH == 16
    return _mm512_movepi32_mask((__m512i)mask);
#else
    return _mm256_movemask_ps((__m256)mask);
#endif
}

// Upper and lower words of the products with Philox's multiplier.
WEFT_INLINE void multiply(Words words, Words& upper, Words& lower) {
#if WEFT_WIDTH == 16
    const __m512i factor = _mm512_set1_epi32(int(PHILOX_MULTIPLIER));
    __m512i even = _mm512_mul_epu32((__m512i)words, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)words, 32), factor);
    upper = (Words)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
    lower = (Words)_mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
#else
    const __m256i factor = _mm256_set1_epi32(int(PHILOX_MULTIPLIER));
    __m256i even = _mm256_mul_epu32((__m256i)words, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)words, 32), factor);
    upper = (Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    lower = (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#endif
}

WEFT_INLINE void philox(uint32_t key, Words& first, Words& second) {
#pragma GCC unroll 10
    for (int i = 0; i < NUM_ROUNDS; i++, key += PHILOX_INCREMENT) {
        Words upper, lower;
        multiply(first, upper, lower);
        first = upper ^ key ^ second;
        second = lower;
    }
}

WEFT_INLINE void split(Floats x, Floats& exponent, Floats& fraction) {
    Words bits = (Words)x - ROOT_HALF_BITS;
    exponent = floats_of((Words)((Ints)bits >> 23));
    fraction = (Floats)((bits & 0x7FFFFFu) + ROOT_HALF_BITS) - 1.0f;
}

WEFT_INLINE Floats ln(Floats exponent, Floats fraction) {
    Floats total = splat(LN_TERMS[7]);
    for (int i = 6; i >= 0; i--) total = product(total, fraction) + LN_TERMS[i];
    return product(exponent, LN_2) + (product(product(fraction, fraction), total) + fraction);
}

WEFT_INLINE Floats gumbels(Words high, Floats v) {
    Words is_small = (Words)(high < (1u << 22));
    Floats exponent, fraction;
    split(product(floats_of((1u << 24) - high) - 0.5f, 0x1p-24f), exponent, fraction);
    exponent = is_small ? splat(0.0f) : exponent;
    fraction = is_small ? -v : fraction;
    split(-ln(exponent, fraction), exponent, fraction);
    return -ln(exponent, fraction);
}

// At least the Gumbel variate of v, because -ln(1 - v) > v, and log2(1 + f) > f makes the bits of v a bound of its log.
WEFT_INLINE Floats noise_bound(Floats v) { return 88.031f - floats_of((Words)v) * (LN_2 * 0x1p-23f); }

template <typename Vector>
WEFT_INLINE Vector load_some(const void* from, long count, Vector rest) {
    if (count >= W) return load<Vector>(from);
    std::memcpy(&rest, from, count * 4);
    return rest;
}

float top_of(const float* logits, long size) {
    Floats top = splat(NEVER);
    for (long i = 0; i < size; i += W) top = larger(load_some(logits + i, size - i, splat(NEVER)), top);  // skips NaN
    float value = top[0];
    for (int lane = 1; lane < W; lane++) value = std::max(value, top[lane]);
    return value;
}

// Place of the winner, the first of equal ones; 0 if no token may win. Most tokens are out before their noise is known.
long winner(const float* logits, const int32_t* token_ids, long size, const Row& row) {
    Words lanes;
    for (int lane = 0; lane < W; lane++) lanes[lane] = lane;
    float best = NEVER, top = top_of(logits, size);
    long place = 0;
    for (long i = 0; i < size; i += W) {
        Floats scores = (load_some(logits + i, size - i, splat(NEVER)) - top) / row.temperature;
        Words is_in = (Words)((scores >= row.floor) & (scores > best - MAX_NOISE));
        if (!lanes_of(is_in)) continue;
        Words first = token_ids ? load_some(token_ids + i, size - i, lanes) : lanes + uint32_t(i);
        Words second = Words{} + row.counter;
        philox(row.key, first, second);
        Words high = first >> 8, low = (first & 0xFFu) << 16 | second >> 16;
        Floats v = product(floats_of(high), 0x1p-24f) + product(floats_of(low) + 0.5f, 0x1p-48f);
        is_in &= (Words)(scores + noise_bound(v) > best);
        if (!lanes_of(is_in)) continue;
        Floats values = scores + gumbels(high, v);
        for (uint32_t left = lanes_of(is_in); left; left &= left - 1) {
            int lane = __builtin_ctz(left);
            if (values[lane] > best) best = values[lane], place = i + lane;
        }
    }
    return place;
}

// One round of splitmix64.
uint64_t mix(uint64_t word) {
    word += GOLDEN;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return word ^ word >> 31;
}

}  // namespace

// logits: rows of `size`, `stride` apart; floors: the lowest score of each row that is kept; token_ids: of the columns,
// or null where they are the tokens; tokens: of the winners.
WEFT_EXPORT void weft_race(const float* logits, long rows, long size, long stride, const float* temperatures,
                           const float* floors, const int64_t* seeds, const int64_t* positions,
                           const int32_t* token_ids, int64_t* tokens, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++) {
        uint64_t word = mix(mix(uint64_t(seeds[r])) + uint64_t(positions[r]) * GOLDEN);
        Row row{temperatures[r], floors[r], uint32_t(word), uint32_t(word >> 32)};
        long place = winner(logits + r * stride, token_ids, size, row);
        tokens[r] = token_ids ? token_ids[place] : place;
    }
}
