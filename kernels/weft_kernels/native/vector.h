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

// Accumulators that fit the registers beside two vectors of weights and one of activations.
constexpr int REGISTERS = WEFT_WIDTH == 16 ? 32 : 16;

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

// bfloat16 is the upper half of a float: widening is exact.
static WEFT_INLINE float widen(uint16_t value) {
    uint32_t word = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

static WEFT_INLINE float widen(float value) { return value; }

static WEFT_INLINE Floats load_wide(const float* from) { return load<Floats>(from); }

static WEFT_INLINE Floats load_wide(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

static WEFT_INLINE float sum(Floats value) {
    float total = 0;
    for (int i = 0; i < W; i++) total += value[i];
    return total;
}

}  // namespace weft
