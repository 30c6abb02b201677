// Rotates one head by the angles of its row, in the rotate-half convention.
#pragma once

#include "../native/vector.h"

namespace weft {

// cos, sin: [2 half], both halves alike; half is a multiple of W. Each product and their sum are rounded to Item.
template <typename Item>
WEFT_INLINE void rotate(const Item* from, const Item* cos, const Item* sin, Item* to, long half) {
    for (long i = 0; i < half; i += W) {
        Floats low = load_wide(from + i), high = load_wide(from + half + i);
        const Item *c = cos + i, *s = sin + i;
        Floats first = rounded<Item>(low * load_wide(c)) - rounded<Item>(high * load_wide(s));
        Floats second = rounded<Item>(high * load_wide(c + half)) + rounded<Item>(low * load_wide(s + half));
        store_narrow(to + i, first);
        store_narrow(to + half + i, second);
    }
}

}  // namespace weft
