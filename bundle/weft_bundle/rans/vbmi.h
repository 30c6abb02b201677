// Look-ups in tables of 256 bytes held in registers, for processors with AVX-512 VBMI and VBMI2.

#pragma once

#include "format.h"

#if WEFT_WIDTH == 16
#define WEFT_PERMUTING __attribute__((target("avx512vbmi,avx512vbmi2")))

namespace {

static_assert(LANES == 64 && GROUP == LANES, "a turn is 64 lanes and a group");

bool can_permute() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"); }

// table[places[i]]; `is_upper`: the places from 128 on.
WEFT_PERMUTING WEFT_INLINE __m512i look_up(const uint8_t* table, __m512i places, __mmask64 is_upper) {
    __m512i lower = _mm512_permutex2var_epi8(load<__m512i>(table), places, load<__m512i>(table + 64));
    __m512i upper = _mm512_permutex2var_epi8(load<__m512i>(table + 128), places, load<__m512i>(table + 192));
    return _mm512_mask_blend_epi8(is_upper, lower, upper);
}

}  // namespace

#else
namespace {

bool can_permute() { return false; }

}  // namespace
#endif
