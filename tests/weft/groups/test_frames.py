"""Frames carry whole steps, and damaged ones are refused."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.frames import BadFrame, decode, encode_logits, encode_step
from weft.engine.step_input import StepInput

NUMBERS = st.integers(0, 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    groups, counts = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 4), max_size=4))
    num_rows, num_chunks = sum(counts), len(counts)
    rows = draw(st.lists(NUMBERS, min_size=(2 + groups) * num_rows, max_size=(2 + groups) * num_rows))
    some = st.lists(st.integers(0, max(0, num_rows - 1)), max_size=num_rows)
    of_chunks = st.lists(NUMBERS, min_size=num_chunks, max_size=num_chunks)
    table = st.lists(NUMBERS, max_size=5).map(tuple)
    tables = st.lists(table, min_size=num_chunks, max_size=num_chunks)
    return StepInput(
        rows=np.array(rows, dtype=np.int64).reshape(2 + groups, num_rows),
        pending_tokens=[],
        logit_rows=draw(some),
        starts=[0, *np.cumsum(counts).tolist()],
        decodes=draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks)),
        lens=[draw(of_chunks) for _ in range(groups)],
        tables=[draw(tables) for _ in range(groups)],
        hidden_rows=draw(some),
        new_pages=[],
    )


def assert_equal(found: StepInput, expected: StepInput) -> None:
    ours, theirs = asdict(found), asdict(expected)
    assert np.array_equal(ours.pop("rows"), theirs.pop("rows"))
    assert ours == theirs


@given(steps(), st.integers(0, 2**64 - 1))
def test_a_step_comes_back_whole(step: StepInput, number: int) -> None:
    frame = decode(encode_step(number, step))
    assert frame.number == number
    assert frame.step is not None
    assert_equal(frame.step, step)


@given(steps(), st.data())
def test_a_frame_that_is_cut_or_too_long_is_refused(step: StepInput, data: st.DataObject) -> None:
    whole = encode_step(3, step)
    with pytest.raises(BadFrame):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(BadFrame):
        decode(whole + b"\0\0\0\0")


@given(steps(), st.data())
def test_any_flipped_byte_gives_a_step_or_a_refusal(step: StepInput, data: st.DataObject) -> None:
    whole = bytearray(encode_step(3, step))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadFrame):
        decode(bytes(whole))


def test_hidden_states_come_back() -> None:
    hidden = np.arange(24, dtype=np.uint8).reshape(2, 12)
    found = decode(encode_logits(7, hidden)).hidden
    assert found is not None
    assert np.array_equal(found, hidden)


def test_steps_of_other_versions_are_refused() -> None:
    whole = bytearray(encode_logits(7, np.zeros((1, 4), np.uint8)))
    whole[4] ^= 1
    with pytest.raises(BadFrame, match=r"version 1, found 0x57465446 of version 0"):
        decode(bytes(whole))


def test_what_followers_cannot_know_is_not_sent() -> None:
    step = StepInput(np.zeros((3, 1), np.int64), [], [], [0, 1], [True], [[1]], [[(0,)]], [], [])
    with pytest.raises(ValueError, match="unknown tokens"):
        encode_step(0, replace(step, pending_tokens=[(0, 0)]))
