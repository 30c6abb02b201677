// Rotates one head by the angles of its row, in the rotate-half convention.
#pragma once

#include "../native/vector.h"

namespace weft {

// cos, sin: [2 half], both halves alike; half is a multiple of W. Products are rounded to Angle, their sum to Item.
// `to` may be `from`.
template <typename Item, typename Angle>
WEFT_INLINE void rotate(const Item* from, const Angle* cos, const Angle* sin, Item* to, long half) {
    for (long i = 0; i < half; i += W) {
        Floats low = load_wide(from + i), high = load_wide(from + half + i);
        const Angle *c = cos + i, *s = sin + i;
        Floats first = rounded<Angle>(low * load_wide(c)) - rounded<Angle>(high * load_wide(s));
        Floats second = rounded<Angle>(high * load_wide(c + half)) + rounded<Angle>(low * load_wide(s + half));
        store_narrow(to + i, first);
        store_narrow(to + half + i, second);
    }
}

}  // namespace weft
