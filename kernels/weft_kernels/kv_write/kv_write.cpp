// Writes new keys or values of any type into the pool, as runs of bytes.

#include "../native/vector.h"

using namespace weft;

// from: rows of `heads` runs of `size` bytes, rows `stride` bytes apart. The run of a row's head h goes to
// to[slot / block_tokens, h, slot % block_tokens], whose strides count bytes.
WEFT_EXPORT void weft_kv_write(const char* from, char* to, const int64_t* slots, long rows, long heads, long size,
                               long stride, long block_tokens, const long* strides) {
    for (long r = 0; r < rows; r++) {
        char* token = to + slots[r] / block_tokens * strides[0] + slots[r] % block_tokens * strides[2];
        for (long h = 0; h < heads; h++)
            std::memcpy(token + h * strides[1], from + r * stride + h * size, size);
    }
}
