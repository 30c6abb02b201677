"""Why sequences end, which never begin, and that cancelling at any point gives all blocks back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.weft.engine.harness import Driver, prefill
from tests.weft.tiny_llama import Tiny
from weft.engine.loop import EngineLoop
from weft.engine.messages import FirstToken, SequenceMode
from weft.engine.runner import ModelRunner
from weft.engine.sampler import LaunchedStep
from weft.engine.step_scheduler import ScheduledChunk
from weft.errors import Cancelled, EngineFailed, InvalidRequest, Overloaded
from weft.request import FinishReason, RequestKey

PROMPT = list(range(3, 43))


def test_a_stop_token_ends_the_text_and_is_part_of_it(grouped: Tiny) -> None:
    text = grouped.greedy(PROMPT, 20)
    stop = text[6]
    with Driver(grouped) as driver:
        heard = driver.generate(PROMPT, 20, stop_token_ids=(stop, 999))
        assert heard.tokens == text[: text.index(stop) + 1]
        assert heard.reason is FinishReason.STOP
        driver.assert_all_blocks_are_back()


def test_the_end_token_ends_the_text_unless_it_is_ignored(grouped: Tiny) -> None:
    text = grouped.greedy(PROMPT, 20)
    with Driver(grouped, eos_token_ids=(text[3], 4)) as driver:
        ended = driver.generate(PROMPT, 20, "ended", ignore_eos=False)
        assert (ended.tokens, ended.reason) == (text[: text.index(text[3]) + 1], FinishReason.STOP)
        going_on = driver.generate(PROMPT, 20, "going on", ignore_eos=True)
        assert (going_on.tokens, going_on.reason) == (text, FinishReason.LENGTH)


def test_the_text_ends_with_the_context(grouped: Tiny) -> None:
    with Driver(grouped, max_context_tokens=50) as driver:
        heard = driver.generate(PROMPT, 1000)
        assert (len(heard.tokens), heard.reason) == (10, FinishReason.LENGTH)


def test_the_text_ends_with_the_pool_when_that_is_smaller(grouped: Tiny) -> None:
    with Driver(grouped, num_blocks=4) as driver:
        heard = driver.generate(PROMPT, 1000)
        assert (len(heard.tokens), heard.reason) == (24, FinishReason.LENGTH)
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize(("resumed", "left"), [(1, 9), (9, 1)])
def test_resumed_tokens_count_against_max_tokens(grouped: Tiny, resumed: int, left: int) -> None:
    with Driver(grouped) as driver:
        assert len(driver.generate(PROMPT, 10, resumed_tokens=resumed).tokens) == left


@pytest.mark.parametrize("ending", ["stop", "max_tokens"])
def test_a_first_token_that_ends_the_text_is_emitted_and_ends_it(grouped: Tiny, ending: str) -> None:
    with Driver(grouped) as driver:
        stop = (77,) if ending == "stop" else ()
        key = driver.submit("a", PROMPT, 20 if stop else 1, wait_for_kv=True, stop_token_ids=stop)
        driver.wait_reserved(key)
        driver.engine.complete_kv(key, len(PROMPT), FirstToken(77))
        heard = driver.wait_end(key)
        assert heard.tokens == [77]
        assert heard.reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize(
    ("prompt", "changes", "param"),
    [
        ([], {}, "prompt"),
        ([131], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5] * 256, {}, "prompt"),
        ([5] * 10, {"num_logprobs": -1}, "logprobs"),
        ([5] * 10, {"num_tokens": 0}, "max_tokens"),
        ([5] * 10, {"num_tokens": 4, "resumed_tokens": 4}, "max_tokens"),
        ([5] * 10, {"priority": 11}, "priority"),
    ],
)
def test_what_can_never_run_is_refused_with_the_field(
    grouped: Tiny, prompt: list[int], changes: dict[str, Any], param: str
) -> None:
    with Driver(grouped) as driver:
        with pytest.raises(InvalidRequest) as caught:
            driver.submit("a", prompt, **changes)
        assert caught.value.param == param
        assert len(driver.generate([5] * 10, 3, "b").tokens) == 3


def test_a_prompt_that_no_pool_can_hold_is_refused(grouped: Tiny) -> None:
    with Driver(grouped, num_blocks=2) as driver, pytest.raises(InvalidRequest, match="has room for 31"):
        driver.submit("a", [5] * 32)


def test_too_many_waiting_sequences_are_refused_and_room_comes_back(grouped: Tiny) -> None:
    driver = Driver(grouped, max_waiting=2)
    driver.submit("a", PROMPT, 2)
    driver.submit("b", PROMPT, 2)
    with pytest.raises(Overloaded):
        driver.submit("c", PROMPT, 2)
    with driver:
        for name in "ab":
            driver.wait_end(RequestKey(name))
        assert len(driver.generate(PROMPT, 2, "d").tokens) == 2


CANCELS: dict[str, Callable[[Driver], RequestKey]] = {}


def cancels(state: str) -> Callable[[Callable[[Driver], RequestKey]], None]:
    """A way to bring a sequence into a state."""

    def note(bring: Callable[[Driver], RequestKey]) -> None:
        CANCELS[state] = bring

    return note


@cancels("just submitted")
def _(driver: Driver) -> RequestKey:
    return driver.submit("a", PROMPT, 100)


@cancels("reserved")
def _(driver: Driver) -> RequestKey:
    key = driver.submit("a", PROMPT, 100, wait_for_kv=True)
    driver.wait_reserved(key)
    return key


@cancels("filled")
def _(driver: Driver) -> RequestKey:
    key = driver.submit("a", PROMPT, 100, wait_for_kv=True)
    driver.wait_reserved(key)
    driver.engine.complete_kv(key, 0)
    return key


@cancels("decoding")
def _(driver: Driver) -> RequestKey:
    key = driver.submit("a", PROMPT, 200)
    driver.wait(lambda: len(driver.heard[key].tokens) >= 3)
    return key


@cancels("in the middle of its prompt")
def _(driver: Driver) -> RequestKey:
    key = driver.submit("a", [7] * 200, mode=SequenceMode.PREFILL)
    driver.wait(lambda: bool(driver.heard[key].progress))
    return key


@cancels("held")
def _(driver: Driver) -> RequestKey:
    prefill(driver, "a", PROMPT)
    assert driver.load.active_blocks == 3
    return RequestKey("a")


@cancels("waiting for blocks")
def _(driver: Driver) -> RequestKey:
    prefill(driver, "in the way", [9] * 17 * 16)
    key = driver.submit("a", PROMPT, 100)
    driver.wait(lambda: driver.load.num_waiting == 1)
    driver.engine.cancel(key)
    driver.engine.release(RequestKey("in the way"))
    return key


@pytest.mark.parametrize("state", CANCELS)
def test_a_cancel_gives_all_blocks_back(grouped: Tiny, state: str) -> None:
    with Driver(grouped, num_blocks=18, chunk_tokens=16, max_context_tokens=288) as driver:
        key = CANCELS[state](driver)
        driver.engine.cancel(key)
        driver.engine.cancel(key)
        assert driver.generate(PROMPT, 8, "next").tokens == grouped.greedy(PROMPT, 8)
        driver.assert_all_blocks_are_back()


def test_late_and_unknown_commands_change_nothing(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        old = driver.submit("a", PROMPT, 12, generation=1)
        new = driver.submit("a", PROMPT, 12, generation=2)
        driver.engine.cancel(old)
        driver.engine.cancel(RequestKey("a", 0))
        driver.engine.complete_kv(new, 0, None, [0, 1])
        driver.engine.complete_kv(RequestKey("b"), 16)
        driver.engine.release(RequestKey("b"))
        driver.engine.unpin([0, 1, 999])
        driver.engine.unquarantine([0, 1, 999])
        assert driver.wait_end(new).tokens == grouped.greedy(PROMPT, 12)
        driver.assert_all_blocks_are_back()


def test_a_second_sequence_with_a_living_key_is_dropped(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        key = driver.submit("a", PROMPT, wait_for_kv=True)
        driver.wait_reserved(key)
        driver.submit("a", [5], 30)
        driver.engine.complete_kv(key, 0)
        driver.heard[key] = type(driver.heard[key])()
        assert driver.wait_end(key).tokens == grouped.greedy(PROMPT, 1)


def test_stopping_fails_what_lives_and_joins_the_thread(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        key = driver.submit("a", PROMPT, wait_for_kv=True)
        driver.wait_reserved(key)
        driver.engine.stop()
        driver.wait(lambda: driver.heard[key].failure is not None)
        failure = driver.heard[key].failure
        assert failure is not None
        assert isinstance(failure.error, Cancelled)
        with pytest.raises(EngineFailed):
            driver.submit("b", PROMPT)


def test_a_crash_fails_every_living_sequence_and_is_logged(
    grouped: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(self: ModelRunner, chunks: Sequence[ScheduledChunk]) -> LaunchedStep:
        raise RuntimeError("the device is gone")

    with Driver(grouped) as driver:
        reserved = driver.submit("reserved", PROMPT, wait_for_kv=True)
        driver.wait_reserved(reserved)
        assert driver.engine.is_alive
        monkeypatch.setattr(ModelRunner, "launch", crash)
        running = driver.submit("running", PROMPT)
        driver.wait(lambda: all(driver.heard[key].failure for key in (reserved, running)))
        failure = driver.heard[running].failure
        assert failure is not None
        assert isinstance(failure.error, EngineFailed)
        assert not driver.engine.is_alive
        assert "the device is gone" in caplog.text
        with pytest.raises(EngineFailed):
            driver.submit("b", PROMPT)


def test_an_idle_engine_takes_no_turns(grouped: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is the answer to something: a spinning thread would take many more."""
    turns: list[int] = []
    turn = EngineLoop.run_step

    def counted(self: EngineLoop, items: Any) -> bool:
        turns.append(len(items))
        return turn(self, items)

    monkeypatch.setattr(EngineLoop, "run_step", counted)
    with Driver(grouped) as driver:
        key = driver.submit("a", PROMPT, wait_for_kv=True)
        driver.wait_reserved(key)
        threading.Event().wait(0.05)
        driver.engine.complete_kv(key, 0)
        driver.wait_end(key)
    assert len(turns) <= 6
