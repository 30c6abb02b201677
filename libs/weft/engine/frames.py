"""The messages of a group's leader to its followers: one frame a step, of numbers only. No tensors.

A frame is a header and int32 arrays; nothing in it is executed or unpickled. Every count is checked against the bytes
that are there, so a damaged frame ends the follower instead of reading beyond.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from weft.engine.step_input import StepInput

MAGIC, VERSION = 0x57465446, 1
# magic, version, kind, step number
_HEADER = struct.Struct("<IHHQ")
# rows, KV groups, chunks, rows of logits, rows of hidden states
_STEP = struct.Struct("<5I")
# rows and bytes of a row
_LOGITS = struct.Struct("<2I")
Ints = NDArray[np.int32]


class FrameKind(IntEnum):
    """What a follower does: a step, or the logits of hidden states that the leader sends along."""

    STEP = 1
    LOGITS = 2


class BadFrame(Exception):
    """Bytes that are no frame of this version."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as a follower reads it. `hidden` [rows, bytes of a row] uint8 belongs to LOGITS."""

    number: int
    step: StepInput | None = None
    hidden: NDArray[np.uint8] | None = None


def encode_step(number: int, step: StepInput) -> bytes:
    """Return a step as bytes. All its tokens must be known, and pages are cleared by the leader.

    Raises ValueError for a step with a draft model's part.
    """
    if step.pending_tokens or step.head is not None:
        raise ValueError("frames carry neither unknown tokens nor a draft model's rows")
    num_groups, num_chunks = len(step.lens), len(step.decodes)
    counts = step.rows.shape[1], num_groups, num_chunks, len(step.logit_rows), len(step.hidden_rows)
    widths = [len(table) for tables in step.tables for table in tables]
    numbers = chain(
        step.logit_rows,
        step.hidden_rows,
        step.starts,
        map(int, step.decodes),
        *step.lens,
        widths,
        *(table for tables in step.tables for table in tables),
    )
    arrays = np.ascontiguousarray(step.rows, dtype="<i4"), np.fromiter(numbers, dtype="<i4")
    header = _HEADER.pack(MAGIC, VERSION, FrameKind.STEP, number) + _STEP.pack(*counts)
    return b"".join((header, arrays[0].tobytes(), arrays[1].tobytes()))


def encode_logits(number: int, hidden: NDArray[np.uint8]) -> bytes:
    """Return the order to compute logits of hidden states [rows, bytes of a row]."""
    return _HEADER.pack(MAGIC, VERSION, FrameKind.LOGITS, number) + _LOGITS.pack(*hidden.shape) + hidden.tobytes()


def decode(data: bytes) -> Frame:
    """Raises BadFrame."""
    if len(data) < _HEADER.size:
        raise BadFrame(f"{len(data)} bytes are too few for a frame")
    magic, version, kind, number = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"expected a frame of version {VERSION}, found {magic:#x} of version {version}")
    body = memoryview(data)[_HEADER.size :]
    try:
        if kind == FrameKind.STEP:
            return Frame(number, step=_decode_step(body))
        if kind == FrameKind.LOGITS:
            rows, width = _LOGITS.unpack_from(body)
            return Frame(number, hidden=np.frombuffer(body[_LOGITS.size :], np.uint8).reshape(rows, width))
    except (struct.error, ValueError) as error:
        raise BadFrame(f"frame {number}: {error}") from None
    raise BadFrame(f"frame {number} is of unknown kind {kind}")


class _Reader:
    """Takes arrays off a frame in order."""

    def __init__(self, numbers: Ints) -> None:
        self._numbers, self._at = numbers, 0

    def take(self, count: int) -> Ints:
        """Return the next `count` numbers. Raises ValueError if there are fewer."""
        found = self._numbers[self._at : self._at + count]
        self._at += count
        if len(found) < count:
            raise ValueError(f"{count} numbers are not there")
        return found

    @property
    def is_done(self) -> bool:
        return self._at == len(self._numbers)


def _decode_step(body: memoryview) -> StepInput:
    num_rows, num_groups, num_chunks, num_logits, num_hidden = _STEP.unpack_from(body)
    reader = _Reader(np.frombuffer(body[_STEP.size :], dtype="<i4"))
    rows = reader.take((2 + num_groups) * num_rows).reshape(2 + num_groups, num_rows)
    logit_rows, hidden_rows = reader.take(num_logits).tolist(), reader.take(num_hidden).tolist()
    starts, decodes = reader.take(num_chunks + 1).tolist(), reader.take(num_chunks).astype(bool).tolist()
    lens = reader.take(num_groups * num_chunks).reshape(num_groups, num_chunks).tolist()
    widths = reader.take(num_groups * num_chunks)
    if len(widths) and int(widths.min()) < 0:
        raise ValueError("a table cannot have a negative width")
    tables = _split(reader.take(int(widths.sum())).tolist(), widths.tolist())
    if not reader.is_done:
        raise ValueError("bytes are left over")
    return StepInput(
        rows=rows.astype(np.int64),
        pending_tokens=[],
        logit_rows=logit_rows,
        starts=starts,
        decodes=decodes,
        lens=lens,
        tables=[tables[group * num_chunks : (group + 1) * num_chunks] for group in range(num_groups)],
        hidden_rows=hidden_rows,
        new_pages=[],
    )


def _split(numbers: list[int], widths: Items[int]) -> list[tuple[int, ...]]:
    return [tuple(numbers[start:end]) for start, end in pairwise(accumulate(widths, initial=0))]
