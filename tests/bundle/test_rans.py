"""The entropy coder against its reference in numpy, and both against what went in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft_bundle import rans
from weft_bundle.rans import codec_choice, coding, library, reference
from weft_kernels.native import CHOICE, processor
from weft_kernels.native.build import FLAGS

Words = NDArray[np.uint16]
ISAS = ["torch", *FLAGS]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of coding that this machine has."""
    chosen = str(request.param)
    if chosen != "torch" and (ISAS.index(chosen) > ISAS.index(processor.most_isa()) or library.load(chosen) is None):
        pytest.skip(f"no {chosen} here")
    monkeypatch.setenv(CHOICE, chosen)
    return chosen


def bf16(values: NDArray[np.float64]) -> Words:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def channels(rows: int, columns: int, spread: float = 0.3) -> Words:
    """Normal weights with louder and quieter rows and columns."""
    rng = np.random.default_rng(rows * 1000 + columns)
    scales = np.exp(spread * rng.standard_normal((rows, 1))) * np.exp(spread * rng.standard_normal((1, columns)))
    return bf16(0.02 * rng.standard_normal((rows, columns)) * scales)


def encoded(coding: rans.Coding, values: Words, first: int) -> rans.CodedRun:
    """In memory of its own."""
    return rans.RunEncoder(coding).encode(values, first, rans.EncodeBuffers(len(values)))


def piece_of(decoder: rans.RunDecoder, first: int, chunk: rans.CodedRun, out: Words) -> rans.DecodeTask:
    """As it is stored."""
    body = np.frombuffer(b"".join(part.tobytes() for part in chunk.parts), np.uint8)
    stored, to = rans.AddressedBytes.of(body), rans.AddressedBytes.of(out.view(np.uint8))
    counts = len(out), len(chunk.words), len(chunk.escape_places)
    return rans.DecodeTask(decoder, first, *counts, stored, 0, len(body), to, 0)


def round_trip(values: Words, is_bf16: bool = True, chunk: int = 1 << 18) -> tuple[Words, int]:
    """What comes back, and the bytes in between."""
    measured = rans.choose_coding(values, is_bf16)
    flat, out, stored = values.reshape(-1), np.empty(values.size, np.uint16), 0
    decoder = rans.RunDecoder(measured.coding)
    pieces = []
    for first in range(0, len(flat), chunk):
        coded = encoded(measured.coding, flat[first : first + chunk], first)
        pieces.append(piece_of(decoder, first, coded, out[first : first + chunk]))
        stored += coded.words.nbytes + coded.rest.nbytes + coded.states.nbytes + 6 * len(coded.escape_places)
    assert all(rans.decode(pieces))
    return out.reshape(values.shape), stored


@pytest.mark.parametrize("is_bf16", [True, False])
def test_every_pattern_comes_back(isa: str, is_bf16: bool) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    assert (round_trip(values, is_bf16)[0] == values).all()
    shuffled = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16).reshape(64, 1024)
    assert (round_trip(shuffled, is_bf16, chunk=5000)[0] == shuffled).all()


ADVERSARIAL: dict[str, Callable[[], Words]] = {
    "zeros": lambda: np.zeros((64, 64), np.uint16),
    "negative zeros": lambda: np.full((64, 64), 0x8000, np.uint16),
    "one value": lambda: np.full((33, 77), 0x3C23, np.uint16),
    "NaN payloads": lambda: (0x7F81 + np.arange(126, dtype=np.uint16)).reshape(2, 63),
    "infinities": lambda: np.tile(np.array([0x7F80, 0xFF80], np.uint16), (16, 8)),
    "denormals": lambda: np.arange(1, 128, dtype=np.uint16).reshape(1, 127),
    "largest and smallest": lambda: np.tile(np.array([0x7F7F, 0x0001], np.uint16), (40, 40)),
    "half zeros": lambda: np.where(np.arange(4096) % 2, channels(1, 4096), 0).astype(np.uint16).reshape(64, 64),
    "rows of zeros": lambda: np.vstack([np.zeros((60, 64), np.uint16), channels(4, 64)]),
    "rows 2^100 apart": lambda: np.vstack([bf16(np.full((8, 64), 1e-30)), bf16(np.full((8, 64), 1e30))]),
    "one element": lambda: np.array([[0x4049]], np.uint16),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_hostile_tensors_come_back(isa: str, name: str) -> None:
    values = np.ascontiguousarray(ADVERSARIAL[name]())
    for is_bf16 in (True, False):
        assert (round_trip(values, is_bf16)[0] == values).all()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    chunk=st.integers(1, 3000),
    is_bf16=st.booleans(),
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
)
def test_any_shape_and_cut_comes_back(
    rows: int, columns: int, chunk: int, is_bf16: bool, seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    values = bf16(rng.standard_normal((rows, columns)) * np.exp2(spread * rng.standard_normal((rows, 1))))
    assert (round_trip(values, is_bf16, chunk)[0] == values).all()


def test_the_library_writes_what_the_reference_writes(isa: str) -> None:
    if isa == "torch":
        pytest.skip("that is the reference")
    for values, is_bf16 in ((channels(90, 517), True), (channels(64, 64), False), (ADVERSARIAL["half zeros"](), True)):
        found = rans.choose_coding(values, is_bf16).coding
        flat = values.reshape(-1)
        for first, end in ((0, len(flat)), (100, 1077)):
            states, words, rest = reference.encode(found, flat[first:end], first)
            is_escape = reference.coded_symbols(found, flat[first:end], first)[1] == coding.ESCAPE
            for is_plain in (False, True):
                memory = rans.EncodeBuffers(end - first)
                chunk = rans.RunEncoder(found).encode(flat[first:end], first, memory, is_plain)
                assert (chunk.states == states).all()
                assert (chunk.words == words).all()
                assert (chunk.rest == rest).all()
                assert (chunk.escape_places == np.flatnonzero(is_escape)).all()
            out = np.empty(end - first, np.uint16)
            assert reference.decode(found, first, out, states, words, rest)
            assert (out == flat[first:end]).mean() > 0.99  # all but escapes


@pytest.mark.parametrize("shape", [(90, 517), (700, 64), (1, 3000), (3000, 1), (600, 1100), (3, 3)])
def test_the_library_chooses_what_the_reference_chooses(isa: str, shape: tuple[int, int]) -> None:
    for values in (channels(*shape), channels(*shape, spread=0.0), np.zeros(shape, np.uint16)):
        for is_bf16 in (True, False):
            found, expected = rans.choose_coding(values, is_bf16), codec_choice.choose_coding_in_numpy(values, is_bf16)
            assert found.bits == pytest.approx(expected.bits, rel=1e-3)
            assert (found.coding.base, found.coding.class_bits) == (expected.coding.base, expected.coding.class_bits)
            for mine, other in (
                (found.coding.row_scales, expected.coding.row_scales),
                (found.coding.column_scales, expected.coding.column_scales),
            ):
                assert np.abs(mine.astype(np.int64) - other).max() <= 1  # sums are rounded in another order
            if not found.coding.class_bits:
                assert (found.coding.shares == expected.coding.shares).all()


@pytest.mark.parametrize("share", [0.9, 0.95, 0.999])
def test_a_symbol_with_nearly_all_shares_comes_back(isa: str, share: float) -> None:
    rng = np.random.default_rng(5)
    values = np.where(rng.random((64, 300)) < share, 0x3C80 + rng.integers(0, 32, (64, 300)), channels(64, 300))
    assert (round_trip(values.astype(np.uint16))[0] == values).all()


def test_what_the_sample_has_not_seen_escapes(isa: str) -> None:
    """Shares come from every eighth row at most; what only other rows hold is listed beside the chunk."""
    values = channels(2048, 64)
    values[1::4, ::7] = np.random.default_rng(1).integers(0, 1 << 16, values[1::4, ::7].shape, dtype=np.uint16)
    measured = rans.choose_coding(values, True)
    chunk = encoded(measured.coding, values.reshape(-1), 0)
    assert len(chunk.escape_places) > 1000
    assert (np.diff(chunk.escape_places.astype(np.int64)) > 0).all()
    assert (chunk.escape_values == values.reshape(-1)[chunk.escape_places]).all()
    assert (round_trip(values, chunk=10_000)[0] == values).all()


def test_loud_rows_and_columns_cost_nothing() -> None:
    values = channels(1024, 1024, spread=0.5)
    out, stored = round_trip(values)
    assert (out == values).all()
    # Less than the weights would take one by one: 67.9 % of BF16 for this spread, since channels tell what to expect.
    assert stored / values.nbytes < rans.entropy_bits(values) / 16 - 0.015
    plain = channels(1024, 1024, spread=0.0)
    assert round_trip(plain)[1] / plain.nbytes < rans.entropy_bits(plain) / 16 + 0.003


@pytest.mark.parametrize("damage", ["a word less", "a word more", "another state", "a bit of a word"])
def test_damage_is_noticed(isa: str, damage: str) -> None:
    values = channels(64, 256)
    found = rans.choose_coding(values, True).coding
    chunk = encoded(found, values.reshape(-1), 0)
    words, states = chunk.words.copy(), chunk.states.copy()
    if damage == "a word less":
        words = words[:-1].copy()
    elif damage == "a word more":
        words = np.append(words, np.uint16(7))
    elif damage == "another state":
        states[5] ^= 1 << 9
    else:
        words[len(words) // 2] ^= 4
    broken = rans.CodedRun(states, words, chunk.rest, chunk.escape_places, chunk.escape_values)
    out = np.empty(values.size, np.uint16)
    [is_whole] = rans.decode([piece_of(rans.RunDecoder(found), 0, broken, out)])
    assert not is_whole or (out != values.reshape(-1)).any()
    if damage != "a bit of a word":
        assert not is_whole


@pytest.mark.parametrize("what", ["no body", "a byte less", "more words", "more escapes", "an escape beyond it"])
def test_what_cannot_be_of_that_many_elements_is_not_whole(isa: str, what: str) -> None:
    """Nothing is read beyond what is stored, nor written beyond what is asked for; others beside it are decoded."""
    values = channels(40, 100)
    decoder = rans.RunDecoder(rans.choose_coding(values, True).coding)
    chunk = encoded(decoder.coding, values.reshape(-1), 0)
    memory = np.full(values.size + 1, 7, np.uint16)
    good = piece_of(decoder, 0, chunk, out := np.empty(values.size, np.uint16))
    bad = piece_of(decoder, 0, chunk, memory[:-1])
    if what == "no body":
        bad = bad._replace(body_bytes=0)
    elif what == "a byte less":
        bad = bad._replace(body_bytes=bad.body_bytes - 1)
    elif what == "more words":
        bad = bad._replace(num_words=(1 << 32) - 1)
    elif what == "more escapes":
        bad = bad._replace(num_escapes=(1 << 32) - 1)
    else:
        beyond = np.array([values.size], np.uint32)
        chunk = replace(chunk, escape_places=beyond, escape_values=np.array([9], np.uint16))
        bad = piece_of(decoder, 0, chunk, memory[:-1])
    assert rans.decode([bad]) == [False]
    assert rans.decode([good, bad, bad, good]) == [True, False, False, True]
    assert memory[-1] == 7
    assert (out == values.reshape(-1)).all()


@pytest.mark.parametrize("num_symbols", [64, 256])
def test_shares_add_up_and_leave_nobody_out(num_symbols: int) -> None:
    rng = np.random.default_rng(3)
    one = np.eye(num_symbols, dtype=np.int64)
    some = [
        rng.integers(0, 2, num_symbols),
        rng.integers(0, 10**6, num_symbols),
        one[9] * 7,
        one[coding.ESCAPE],
        0 * one[0],
    ]
    shares = coding.shares_of(np.stack(some))
    total = coding.UNITS * num_symbols
    assert (shares % coding.GRAIN == 0).all()
    assert (shares.sum(1, dtype=np.int64) == total).all()
    assert (shares[np.stack(some) > 0] > 0).all()
    assert (shares[:, coding.ESCAPE] > 0).all()
    assert shares.max() < total


@settings(max_examples=30, deadline=None)
@given(class_bits=st.sampled_from([0, 2]), seed=st.integers(0, 1 << 30), steepness=st.floats(0, 20))
def test_the_library_fills_buckets_as_the_reference_does(class_bits: int, seed: int, steepness: float) -> None:
    rng = np.random.default_rng(seed)
    counts = (1e6 * np.exp(-steepness * rng.random((1 << class_bits, 256 >> class_bits)))).astype(np.int64)
    scales = np.zeros(1, np.int8)
    some = rans.Coding(True, 0, class_bits, coding.shares_of(counts), scales, scales)
    buckets, tables = reference.buckets_of(some), rans.RunDecoder(some).tables.astype(np.int64)
    firsts = np.arange(0, 256, some.num_symbols)[:, None]
    assert (tables[0] == buckets.cut.reshape(-1)).all()
    assert (tables[1] == (buckets.other + firsts).reshape(-1)).all()
    assert ((tables[2] | tables[3] << 8) == (buckets.moved.reshape(-1) << class_bits & 0xFFFF)).all()
    assert ((tables[4] | tables[5] << 8) == some.shares.reshape(-1).astype(np.int64) << class_bits).all()
    for number in range(1 << class_bits):
        places = np.concatenate(reference.units_of(some, buckets, number))
        assert len(set(places.tolist())) == some.total  # every slot is somebody's, and nobody else's


@pytest.mark.parametrize("is_bf16", [True, False])
def test_turns_without_permutations_give_the_same(is_bf16: bool) -> None:
    """What processors without AVX-512 VBMI do; on those both are the same code."""
    values = channels(300, 333)
    found = rans.choose_coding(values, is_bf16).coding
    decoder, flat = rans.RunDecoder(found), values.reshape(-1)
    chunks = [(first, encoded(found, flat[first : first + 30_000], first)) for first in range(0, len(flat), 30_000)]
    for is_plain in (False, True):
        out = np.zeros_like(flat)
        pieces = [piece_of(decoder, first, chunk, out[first : first + 30_000]) for first, chunk in chunks]
        assert all(rans.decode(pieces, is_plain))
        assert (out == flat).all()


@pytest.mark.parametrize("kinds", ["BBBBBBB", "FFF", "BFBFBBFF", "BBFB"])
def test_several_of_any_kinds_and_lengths_are_decoded_at_once(isa: str, kinds: str) -> None:
    """One that ends, or has few words left, while others go on; and two formats side by side."""
    values = {"B": channels(150, 333), "F": channels(150, 333, 0.5)}
    decoders = {kind: rans.RunDecoder(rans.choose_coding(each, kind == "B").coding) for kind, each in values.items()}
    for count in range(1, len(kinds) + 1):
        wanted, pieces, outs = [], [], []
        for number, kind in enumerate(kinds[:count]):
            first, size = 64 * number, (7_000, 64, 20_001, 1_024, 5)[(number + count) % 5]
            wanted.append(part := values[kind].reshape(-1)[first : first + size])
            outs.append(np.zeros_like(part))
            coded = encoded(decoders[kind].coding, part, first)
            pieces.append(piece_of(decoders[kind], first, coded, outs[-1]))
        assert all(rans.decode(pieces))
        assert all((out == part).all() for out, part in zip(outs, wanted, strict=True))
