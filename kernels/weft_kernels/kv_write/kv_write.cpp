// Writes new keys or values of any type into the pool, as runs of bytes.

#include "../native/vector.h"

using namespace weft;

// from: rows of `heads` runs of `size` bytes, rows `stride` bytes apart. The run of a row's head h goes to
// pool[slot / block_tokens, h, part of the layer, slot % block_tokens]; a head of a block has `parts` parts.
WEFT_EXPORT void weft_kv_write(const char* from, char* pool, const int64_t* slots, long rows, long heads, long size,
                               long stride, long parts, long part, long block_tokens) {
    for (long r = 0; r < rows; r++) {
        long block = slots[r] / block_tokens, offset = slots[r] % block_tokens;
        for (long h = 0; h < heads; h++) {
            long place = ((block * heads + h) * parts + part) * block_tokens + offset;
            std::memcpy(pool + place * size, from + r * stride + h * size, size);
        }
    }
}
