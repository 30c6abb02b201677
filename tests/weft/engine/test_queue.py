"""Thousands of sequences at once: all end, all blocks come back, and a step costs what it costs with a few."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from tests.weft.engine.counting import CONFIG, CountingRunner
from tests.weft.engine.harness import Driver
from tests.weft.tiny_llama import Tiny
from weft.engine.loop import EngineLoop
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.engine.sequence import Sequence
from weft.errors import Overloaded
from weft.request import RequestKey, SamplingParams

NUM_TURNS = 40


class Steps:
    """How many instructions of Python were executed."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self.trace


@contextmanager
def counted() -> Iterator[Steps]:
    steps, before = Steps(), sys.gettrace()
    gc.collect()
    gc.disable()  # else finalizers of what others have left are counted, and when they run is chance
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
        gc.enable()


def loop_with(num_waiting: int, steps_ahead: int) -> EngineLoop:
    config = replace(CONFIG, steps_ahead=steps_ahead, pin_sealed=False, num_blocks=60)
    loop = EngineLoop(CountingRunner(config), config, lambda _: None, lambda: 0.0)
    for number in range(num_waiting):
        sampling = SamplingParams(3, ignore_eos=True)
        spec = SequenceSpec(RequestKey(f"{number:04}"), (number % 100, 1, 2), sampling, SequenceMode.GENERATE)
        loop._add(Sequence(spec, list(spec.token_ids), float(number)))
    return loop


def test_a_turn_takes_no_more_instructions_with_5000_waiting_than_with_200(steps_ahead: int) -> None:
    costs = []
    for num_waiting in (200, 5000):
        loop = loop_with(num_waiting, steps_ahead)
        with counted() as steps:
            for _ in range(NUM_TURNS):
                loop.run_step([])
        assert loop.num_waiting > num_waiting - 150
        costs.append(steps.count)
    few, many = costs
    assert many < few * 1.1


def test_a_cancel_takes_no_more_instructions_with_5000_waiting_than_with_200(steps_ahead: int) -> None:
    costs = []
    for num_waiting in (200, 5000):
        loop = loop_with(num_waiting, steps_ahead)
        with counted() as steps:
            for number in range(0, num_waiting, num_waiting // 40):
                loop.cancel(RequestKey(f"{number:04}"))
        costs.append(steps.count)
    few, many = costs
    assert many < few * 2  # a search by halves


def test_5000_at_once_all_end_and_give_their_blocks_back(grouped: Tiny) -> None:
    driver = Driver(grouped, max_waiting=5000, max_num_seqs=256, num_blocks=512, chunk_tokens=512)
    names = [str(number) for number in range(5000)]
    prompts = [[3 + number % 100, 3 + number // 100, 7] for number in range(5000)]
    for name, prompt in zip(names, prompts, strict=True):
        driver.submit(name, prompt, 2)
    with pytest.raises(Overloaded, match="5000 sequences are waiting"):
        driver.submit("one too many", [5], 2)
    with driver:
        ends = [driver.wait_end(RequestKey(name)) for name in names]
        assert all(len(end.tokens) == 2 for end in ends)
        for number in (0, 1234, 4999):
            assert ends[number].tokens == grouped.greedy(prompts[number], 2)
        driver.assert_all_blocks_are_back()
        assert driver.generate([5], 2, "later").reason is not None
