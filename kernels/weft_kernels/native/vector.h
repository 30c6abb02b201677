// Vectors of WEFT_WIDTH floats, the same code for every instruction set: the compiler's own vector types.
// A source that includes this is compiled once for each instruction set, into a library of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

// Threads are not woken for less.
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

static WEFT_INLINE Floats splat(float value) { return Floats{} + value; }

static WEFT_INLINE Floats load_wide(const float* from) { return load<Floats>(from); }

// bfloat16 is the upper half of a float: widening is exact.
static WEFT_INLINE Floats load_wide(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

static WEFT_INLINE void store_narrow(float* to, Floats value) { store(to, value); }

// To the nearest bfloat16, ties to even, as torch rounds; a NaN stays one.
static WEFT_INLINE void store_narrow(uint16_t* to, Floats value) {
    Words words = (Words)value, rounded = (words + 0x7FFFu + ((words >> 16) & 1u)) >> 16;
    Words is_nan = (Words)(value != value);
    rounded = (is_nan & 0x7FC0u) | (~is_nan & rounded);
    store(to, __builtin_convertvector(rounded, Halves));
}

template <int Size>
struct Sum {
    typedef float Half __attribute__((vector_size(2 * Size)));
    template <typename Vector>
    static WEFT_INLINE float of(Vector value) {
        Half halves[2];
        std::memcpy(halves, &value, sizeof value);
        return Sum<Size / 2>::of(halves[0] + halves[1]);
    }
};

template <>
struct Sum<2> {
    template <typename Vector>
    static WEFT_INLINE float of(Vector value) {
        return value[0] + value[1];
    }
};

static WEFT_INLINE float sum(Floats value) { return Sum<W>::of(value); }

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
