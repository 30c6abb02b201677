"""Who reads does not wait for who decodes, and of those no more work at once than there are processors."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.weft.weights.checkpoints import make_checkpoint
from weft.errors import BadCheckpoint
from weft.weights.checkpoint import read_checkpoint
from weft.weights.formats import PieceRun, ProcessorSlot, ReadBuffers, RunReader
from weft.weights.load import ImageLayout, fill_image, image_layout

NUM_THREADS, NUM_RUNS = 4, 40


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: RunReader) -> None:
    """So many runs, as on a machine of two processors."""
    make_checkpoint(tmp_path / "model")
    planned = image_layout(read_checkpoint(tmp_path / "model"))
    runs = list(planned.runs())[:1] * NUM_RUNS
    monkeypatch.setattr(ImageLayout, "runs", lambda self: iter(runs))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with tempfile.TemporaryFile() as file:
        fill_image(file.fileno(), planned, read, lambda size, name: None, NUM_THREADS)


def test_as_many_threads_as_processors_work_on_what_the_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, at_work, most = threading.Lock(), 0, 0
    all_read = threading.Barrier(NUM_THREADS)

    def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
        nonlocal at_work, most
        all_read.wait(10)  # nobody has to have a turn for that
        memory.slot.acquire()
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.001)
        with lock:
            at_work -= 1
        return memoryview(bytes(run.size))

    load(tmp_path, monkeypatch, read)
    assert most == 2


def test_a_turn_is_given_back_by_who_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: set[ProcessorSlot] = set()

    def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
        memory.slot.acquire()
        turns.add(memory.slot)
        raise BadCheckpoint("damaged")

    with pytest.raises(BadCheckpoint):
        load(tmp_path, monkeypatch, read)
    assert turns
    assert not any(turn._is_held for turn in turns)


def test_taken_and_given_more_than_once() -> None:
    processors = threading.Semaphore(1)
    turn = ProcessorSlot(processors)
    for _ in range(2):
        turn.acquire()
        turn.acquire()
        assert not processors.acquire(blocking=False)
        turn.release()
        turn.release()
        assert processors.acquire(blocking=False)
        assert not processors.acquire(blocking=False), "it was given back once"
        processors.release()
    ProcessorSlot().acquire()
