// AMX tile registers: eight tiles of up to 16 rows of 64 bytes. A process requests them from Linux once
// (`weft_kernels.native`); each thread configures and releases them.
#pragma once

#include "vector.h"

#ifdef __AMX_BF16__

namespace weft {

// Tiles 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right operands.
class TileRegisters {
  public:
    explicit TileRegisters(long rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } layout;
        for (int i = 0; i < 8; i++) layout.row_bytes[i] = 64, layout.rows[i] = uint8_t(i < 6 ? rows : 16);
        _tile_loadconfig(&layout);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

// Rounds up to a cache line, because tiles are read by lines; the memory needs room for one more line.
template <typename Item>
uint16_t* at_line(Item* memory) {
    return (uint16_t*)((size_t(memory) + 63) / 64 * 64);
}

}  // namespace weft

#endif
