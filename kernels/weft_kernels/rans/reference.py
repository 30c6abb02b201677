"""The coder in numpy, the meaning of decode.cpp and encode.cpp.

Element i of a chunk belongs to lane i % 32. A lane's state is 32 bits wide and at least 2^16; coding runs backwards
from 2^16 in every lane, and whenever a state would grow too far its lower 16 bits go to the one stream of words that
all lanes share, so that decoding, forwards, takes words in the order of the elements. (Interleaved rANS: J. Duda,
"Asymmetric numeral systems", arXiv 1311.2540; F. Giesen, "Interleaved entropy coders", arXiv 1402.3392.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft_kernels.rans.coding import (
    COUNT_OFFSET,
    ESCAPE,
    FIRST_KEY_SYMBOL,
    NUM_KEYS,
    PRECISION,
    SYMBOLS,
    TOTAL,
    ZERO,
    Coding,
)

LANES, GROUP = 32, 64
LOWEST = 1 << 16
Words = NDArray[np.uint16]


def contexts_of(coding: Coding, first: int, count: int) -> NDArray[np.int64]:
    """Scale of row plus scale of column of each element, in sixteenths of an octave."""
    places = np.arange(first, first + count)
    columns = len(coding.column_scales)
    rows = coding.row_scales.astype(np.int64)[places // columns]
    return rows + coding.column_scales.astype(np.int64)[places % columns]


def symbols_of(coding: Coding, values: Words, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Symbol of each value: ZERO, ESCAPE, or its key less what context and base suggest."""
    sizes = values.astype(np.int64) & 0x7FFF
    symbols = (sizes >> coding.low_bits) - 4 * ((contexts >> 4) + coding.base)
    symbols[(symbols < FIRST_KEY_SYMBOL) | (symbols >= SYMBOLS)] = ESCAPE
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
    last = groups[:, 48:]
    spare = np.concatenate([last & 3, last >> 2 & 3, last >> 4], axis=1)
    return (groups[:, :48] | spare << 6).astype(np.uint8).reshape(-1)


def unpack_rest(coding: Coding, rest: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """BF16: 48 bytes hold six bits each, the fourth quarter in the spare two of the others. FP16: bytes, then signs."""
    if coding.low_bits == 8:
        groups = rest.reshape(-1, 72)
        signs = np.unpackbits(groups[:, 64:], axis=1, bitorder="little").astype(np.int64)
        return (groups[:, :64] | signs << 8).reshape(-1)[:count]
    groups = rest.reshape(-1, 48).astype(np.int64)
    spare = groups >> 6
    last = spare[:, :16] | spare[:, 16:32] << 2 | spare[:, 32:] << 4
    return np.concatenate([groups & 63, last], axis=1).reshape(-1)[:count]


def encode(coding: Coding, values: Words, first: int) -> tuple[NDArray[np.uint32], Words, NDArray[np.uint8]]:
    """The lanes' states, the words, and the rest, of `values` that begin at element `first` of the tensor."""
    places = coded_symbols(coding, values, first)
    shares, starts = coding.shares[places].astype(np.int64), coding.starts[places].astype(np.int64)
    states = np.full(LANES, LOWEST, dtype=np.int64)
    steps = []
    for begin in reversed(range(0, len(values), LANES)):
        share, start = shares[begin : begin + LANES], starts[begin : begin + LANES]
        state = states[: len(share)]
        is_full = state >= share << (32 - PRECISION)
        steps.append((state[is_full] & 0xFFFF).astype(np.uint16))
        state = np.where(is_full, state >> 16, state)
        states[: len(share)] = (state // share << PRECISION) + state % share + start
    words = np.concatenate(steps[::-1]) if steps else np.empty(0, np.uint16)
    return states.astype(np.uint32), words, rest_of(coding, values)


def decode(
    coding: Coding, first: int, out: Words, states: NDArray[np.uint32], words: Words, rest: NDArray[np.uint8]
) -> bool:
    """Fill `out`; escapes come out as something else. False unless words and states end where coding began."""
    contexts = contexts_of(coding, first, len(out))
    tables = (contexts & 15) >> (4 - coding.class_bits) << PRECISION
    table, state, taken = coding.table().astype(np.int64), states.astype(np.int64), 0
    symbols = np.empty(len(out), dtype=np.int64)
    for begin in range(0, len(out), LANES):
        lanes = slice(0, min(LANES, len(out) - begin))
        entries = table[tables[begin : begin + LANES] | state[lanes] & (TOTAL - 1)]
        moved = (entries >> 8 & 0xFFF) * (state[lanes] >> PRECISION) + (entries >> 20)
        is_low = moved < LOWEST
        fresh = words[taken : taken + int(is_low.sum())]
        if len(fresh) < is_low.sum():
            return False
        taken += len(fresh)
        moved[is_low] = moved[is_low] << 16 | fresh
        state[lanes] = moved
        symbols[begin : begin + LANES] = entries & 0xFF
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
