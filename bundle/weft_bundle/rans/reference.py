"""The coder in numpy, the meaning of tables.cpp, decode.cpp and encode.cpp.

Element i of a chunk belongs to lane i % 64. A lane's state is 32 bits wide and at least 2^16; coding runs backwards
from 2^16 in every lane, and whenever a state would grow too far its lower 16 bits go to the one stream of words that
all lanes share, so that decoding, forwards, takes words in the order of the elements. (Interleaved rANS: J. Duda,
"Asymmetric numeral systems", arXiv 1311.2540; F. Giesen, "Interleaved entropy coders", arXiv 1402.3392.)

The lower half of a state is a slot. Its lowest bits say in which bucket it lies, one for each symbol, and a bucket has
two owners at most (the alias method: A. J. Walker 1977), so that small tables map a slot to its symbol.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft_bundle.rans.coding import (
    COUNT_OFFSET,
    ESCAPE,
    FIRST_KEY_SYMBOL,
    NUM_KEYS,
    UNITS,
    ZERO,
    Coding,
)

LANES, GROUP = 64, 64
LOWEST = 1 << 16
Words = NDArray[np.uint16]


def contexts_of(coding: Coding, first: int, count: int) -> NDArray[np.int64]:
    """Scale of row plus scale of column of each element, in sixteenths of an octave; none where there is one class."""
    if not coding.class_bits:
        return np.zeros(count, np.int64)
    places = np.arange(first, first + count)
    columns = len(coding.column_scales)
    rows = coding.row_scales.astype(np.int64)[places // columns]
    return rows + coding.column_scales.astype(np.int64)[places % columns]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Each [classes, symbols]. Positions of a bucket are 0..255; from `cut` on they are the symbol `other`'s.

    A position is a unit; what is `moved` is added to it to make it a unit of that symbol.
    """

    cut: NDArray[np.int64]
    other: NDArray[np.int64]
    moved: NDArray[np.int64]


def buckets_of(coding: Coding) -> Buckets:
    """Fill buckets: a symbol with less than a bucket leaves the upper part to a symbol with more.

    Small and large symbols are taken from the highest down; a large symbol that becomes small is the next small one.
    """
    cut, moved = np.zeros_like(coding.shares, np.int64), np.zeros_like(coding.shares, np.int64)
    other = np.tile(np.arange(coding.num_symbols), (len(cut), 1))
    for number, shares in enumerate(coding.shares.astype(np.int64)):
        left = shares.copy()
        small, large = list(np.flatnonzero(left < UNITS)), list(np.flatnonzero(left > UNITS))
        while small and large:
            bucket, giver = small.pop(), large[-1]
            cut[number, bucket], other[number, bucket] = left[bucket], giver
            left[giver] -= UNITS - left[bucket]
            moved[number, bucket] = left[giver] - left[bucket]
            if left[giver] <= UNITS:
                large.pop()
            if left[giver] < UNITS:
                small.append(giver)
    return Buckets(cut, other, moved)


def units_of(coding: Coding, buckets: Buckets, number: int) -> list[NDArray[np.int64]]:
    """Of each symbol of a class: its units' places, bucket | position << 8, in order."""
    owned = [np.zeros(int(share), np.int64) for share in coding.shares[number]]
    positions = np.arange(UNITS)
    for bucket, units in enumerate(owned):
        own = positions[: min(len(units), UNITS)]  # a part of them may be overwritten: the last ones are given away
        units[own] = bucket | own << 8
    for bucket, other in enumerate(buckets.other[number]):
        if other != bucket:
            given = positions[buckets.cut[number, bucket] :]
            owned[other][given + buckets.moved[number, bucket]] = bucket | given << 8
    return owned


def symbols_of(coding: Coding, values: Words, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Symbol of each value: ZERO, ESCAPE, or its key less what context and base suggest."""
    sizes = values.astype(np.int64) & 0x7FFF
    symbols = (sizes >> coding.low_bits) - 4 * ((contexts >> 4) + coding.base)
    symbols[(symbols < FIRST_KEY_SYMBOL) | (symbols >= coding.num_symbols)] = ESCAPE
    symbols[sizes == 0] = ZERO
    return symbols


def coded_symbols(coding: Coding, values: Words, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Class and symbol of each value as they are coded: a symbol that has no share in its class becomes an escape."""
    contexts = contexts_of(coding, first, len(values))
    classes, symbols = (contexts & 15) >> (4 - coding.class_bits), symbols_of(coding, values, contexts)
    symbols[coding.shares[classes, symbols] == 0] = ESCAPE
    return classes, symbols


def rest_of(coding: Coding, values: Words) -> NDArray[np.uint8]:
    """Signs and low bits, packed in groups of 64: see `unpack_rest`."""
    low = coding.low_bits
    bits = np.zeros(-(-len(values) // GROUP) * GROUP, dtype=np.uint16)
    bits[: len(values)] = (values & ((1 << low) - 1)) | (values >> 15) << low
    groups = bits.reshape(-1, GROUP)
    if low == 8:
        signs = np.packbits((groups >> 8).astype(np.uint8), axis=1, bitorder="little")
        return np.concatenate([groups.astype(np.uint8), signs], axis=1).reshape(-1)
    each = np.unpackbits(groups.astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :6]
    return np.packbits(each.reshape(len(groups), -1), axis=1, bitorder="little").reshape(-1)


def unpack_rest(coding: Coding, rest: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """BF16: six bits each, one after another, the lowest first. FP16: bytes, then signs."""
    if coding.low_bits == 8:
        groups = rest.reshape(-1, 72)
        signs = np.unpackbits(groups[:, 64:], axis=1, bitorder="little").astype(np.int64)
        return (groups[:, :64] | signs << 8).reshape(-1)[:count]
    six = np.unpackbits(rest, bitorder="little").reshape(-1, 6)
    return np.packbits(six, axis=1, bitorder="little").reshape(-1)[:count].astype(np.int64)


def encode(coding: Coding, values: Words, first: int) -> tuple[NDArray[np.uint32], Words, NDArray[np.uint8]]:
    """The lanes' states, the words, and the rest, of `values` that begin at element `first` of the tensor."""
    classes, symbols = coded_symbols(coding, values, first)
    buckets, bits = buckets_of(coding), coding.class_bits
    units = [units_of(coding, buckets, number) for number in range(len(coding.shares))]
    states = np.full(LANES, LOWEST, dtype=np.int64)
    steps = []
    for begin in reversed(range(0, len(values), LANES)):
        lanes = slice(begin, begin + LANES)
        of_class, of_symbol = classes[lanes], symbols[lanes]
        share = coding.shares[of_class, of_symbol].astype(np.int64) << bits
        state = states[: len(share)]
        is_full = state >= share << 16
        steps.append((state[is_full] & 0xFFFF).astype(np.uint16))
        state = np.where(is_full, state >> 16, state)
        rest = state % share
        chosen = zip(of_class, of_symbol, rest >> bits, strict=True)
        slots = np.array([units[number][symbol][unit] for number, symbol, unit in chosen])
        states[: len(share)] = state // share << 16 | slots | (rest & ((1 << bits) - 1)) << coding.symbol_bits
    words = np.concatenate(steps[::-1]) if steps else np.empty(0, np.uint16)
    return states.astype(np.uint32), words, rest_of(coding, values)


def decode(
    coding: Coding, first: int, out: Words, states: NDArray[np.uint32], words: Words, rest: NDArray[np.uint8]
) -> bool:
    """Fill `out`; escapes come out as something else. False unless words and states end where coding began."""
    contexts, buckets = contexts_of(coding, first, len(out)), buckets_of(coding)
    classes, shares = (contexts & 15) >> (4 - coding.class_bits), coding.shares.astype(np.int64) << coding.class_bits
    state, taken = states.astype(np.int64), 0
    symbols = np.empty(len(out), dtype=np.int64)
    for begin in range(0, len(out), LANES):
        lanes = slice(0, min(LANES, len(out) - begin))
        of_class, slot = classes[begin : begin + LANES], state[lanes] & 0xFFFF
        own = of_class, slot & (coding.num_symbols - 1)
        is_other = slot >> 8 >= buckets.cut[own]
        symbol = np.where(is_other, buckets.other[own], own[1])
        within = (slot >> coding.symbol_bits) + np.where(is_other, buckets.moved[own] << coding.class_bits, 0)
        moved = shares[of_class, symbol] * (state[lanes] >> 16) + within
        is_low = moved < LOWEST
        fresh = words[taken : taken + int(is_low.sum())]
        if len(fresh) < is_low.sum():
            return False
        taken += len(fresh)
        moved[is_low] = moved[is_low] << 16 | fresh
        state[lanes] = moved
        symbols[begin : begin + LANES] = symbol
    bits, low = unpack_rest(coding, rest, len(out)), coding.low_bits
    keys = symbols + 4 * ((contexts >> 4) + coding.base)
    sizes = np.where(symbols < FIRST_KEY_SYMBOL, 0, keys << low | bits & ((1 << low) - 1))
    out[:] = ((sizes & 0x7FFF) | bits >> low << 15).astype(np.uint16)
    return taken == len(words) and bool((state == LOWEST).all())


def count_keys(coding: Coding, values: Words) -> NDArray[np.int64]:
    """[classes, NUM_KEYS + 1]: how often each key stands in each class, before base; zeros last."""
    contexts = contexts_of(coding, 0, len(values))
    sizes = values.astype(np.int64) & 0x7FFF
    keys = (sizes >> coding.low_bits) - 4 * (contexts >> 4) + COUNT_OFFSET
    keys[sizes == 0] = NUM_KEYS
    places = ((contexts & 15) >> (4 - coding.class_bits)) * (NUM_KEYS + 1) + keys
    return np.bincount(places, minlength=(NUM_KEYS + 1) << coding.class_bits).reshape(-1, NUM_KEYS + 1)


def squares(values: Words, is_bf16: bool) -> NDArray[np.float32]:
    """Of the numbers that the patterns stand for; infinities, NaN and the unmeasurably large count as nothing."""
    words = (values & 0x7FFF).astype(np.uint32) << (16 if is_bf16 else 13)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = words.view(np.float32) * np.float32(1 if is_bf16 else 2.0**112)
        return np.where(sizes < 1e15, sizes * sizes, 0).astype(np.float32)
