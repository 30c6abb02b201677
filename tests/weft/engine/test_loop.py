"""The loop with a runner that only counts: whatever comes in whatever order, all ends well and no block is lost.

Once for a model whose layers all see everything, once for groups that see a window or a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.weft.engine.counting import BOUNDED, CONFIG, WINDOWS, CountingRunner, next_token
from tests.weft.engine.scripted import ScriptedSpeculator
from weft.engine.loop import EngineLoop
from weft.engine.messages import FirstToken, Reserved, SequenceMode, SequenceSpec, StepOutput
from weft.engine.sequence import Sequence
from weft.engine.wait_queue import MAX_FIRST_TOKENS
from weft.kv.layer_groups import AttentionSpan, PageRange
from weft.request import FinishReason, RequestKey, SamplingParams

NUM_DRAFTING = int(os.environ.get("WEFT_SOAK_EXAMPLES", "20"))
NUM_PLAIN = 3 * NUM_DRAFTING


class LoopMachine(RuleBasedStateMachine):
    """Clients, peers and transfers in random order."""

    config = CONFIG
    steps_ahead = 0
    share_right: float | None = None  # of drafts; None: nothing drafts

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # groups that give pages back hold those of two steps when one is under way
        more = 7 * self.steps_ahead * self.config.paging.is_bounded
        self.config = replace(self.config, steps_ahead=self.steps_ahead, num_blocks=self.config.num_blocks + more)
        self.runner = CountingRunner(self.config)
        share = self.share_right
        self.speculator = None if share is None else ScriptedSpeculator(foresee, share, is_varied=True)
        self.loop = EngineLoop(self.runner, self.config, self.hear, lambda: self.now, self.speculator)
        self.specs: dict[RequestKey, SequenceSpec] = {}
        self.texts: dict[RequestKey, list[int]] = {}
        self.reserved: dict[RequestKey, Reserved] = {}
        self.held: set[RequestKey] = set()
        self.lent: dict[RequestKey, list[PageRange]] = {}
        self.pinned: list[int] = []
        self.suspects: set[int] = set()
        self.is_idle = True

    def hear(self, output: StepOutput) -> None:
        load = output.load
        total = load.free_blocks + load.cached_blocks + load.active_blocks + load.quarantined_blocks
        assert total == self.config.num_blocks
        assert not output.failures
        for reserved in output.reserved:
            self.reserved[reserved.key] = reserved
        for progress in output.progress:
            num_prompt, num_final = len(self.specs[progress.key].token_ids), progress.num_ready_tokens // 4
            self.lent[progress.key] = [
                run.within(self.config.paging.needed_blocks(group, 0, num_prompt, num_prompt).start, num_final)
                for group, run in enumerate(progress.page_ranges)
            ]
        self.pinned += [sealed.block for sealed in output.sealed]
        assert len(self.pinned) <= CONFIG.max_pinned
        for delta in output.deltas:
            spec, text = self.specs[delta.key], self.texts[delta.key]
            assert (delta.prompt is None) == bool(text)
            assert delta.prompt is None or delta.prompt.num_cached_tokens <= len(spec.token_ids)
            for token in delta.token_ids:
                assert not text or text[-1] not in spec.sampling.stop_token_ids, "a token after the end"
                assert token == next_token([*spec.token_ids, *text])
                text.append(token)
            if spec.mode is SequenceMode.PREFILL:
                assert delta.finish_reason is None
                self.held.add(delta.key)
            elif delta.finish_reason is FinishReason.LENGTH:
                num_expected = min(spec.sampling.max_tokens, self.config.context_tokens - len(spec.token_ids))
                assert len(text) == num_expected
                self.forget(delta.key)
            elif delta.finish_reason is FinishReason.STOP:
                assert text[-1] in spec.sampling.stop_token_ids
                self.forget(delta.key)

    def forget(self, key: RequestKey) -> None:
        del self.specs[key]
        self.reserved.pop(key, None)
        self.held.discard(key)
        self.lent.pop(key, None)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        num_tokens=st.integers(1, 30),
        mode=st.sampled_from(SequenceMode),
        waits=st.booleans(),
        stops=st.sampled_from([(), (3,), tuple(range(0, 100, 7))]),
        priority=st.integers(-1, 1),
    )
    def submit(self, num_tokens: int, stops: tuple[int, ...], **fields: Any) -> None:
        key, prompt, waits = RequestKey(str(len(self.texts))), fields.pop("prompt"), fields.pop("waits")
        sampling = SamplingParams(num_tokens, stop_token_ids=stops, ignore_eos=True)
        self.specs[key] = SequenceSpec(key, tuple(prompt), sampling, wait_for_kv=waits, **fields)
        self.texts[key] = []
        self.is_idle = self.loop.run_step([Sequence(self.specs[key], prompt, self.now)])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), with_first=st.booleans())
    def fill(self, data: st.DataObject, with_first: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved, key=str)))
        reserved = self.reserved.pop(key)
        spec = self.specs[key]
        tokens = spec.token_ids
        has_first = with_first and spec.mode is SequenceMode.GENERATE
        num_ready = data.draw(st.integers(0, len(tokens) - (not has_first)))
        blocks = [block for run in reserved.page_ranges for block in run.blocks]
        suspects = data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=2))
        self.transfer(reserved, tokens, num_ready)
        first = FirstToken(next_token(tokens)) if has_first else None
        self.suspects.update(suspects)
        self.is_idle = self.loop.run_step([lambda: self.loop.complete_kv(key, num_ready, first, tuple(suspects))])

    def transfer(self, reserved: Reserved, tokens: Items[int], num_ready: int) -> None:
        """What peers do: of each group, write what a token behind the first `num_ready` looks at."""
        paging, num_hit = self.config.paging, reserved.num_hit_tokens // 4
        if num_ready > reserved.num_hit_tokens:
            for group, run in enumerate(reserved.page_ranges):
                lent = paging.needed_blocks(group, num_hit, num_ready, len(tokens))
                places = range(4 * lent.start, min(4 * lent.stop, num_ready))
                placed = paging.remap(group, run, num_hit, paging.retention_point(num_ready, len(tokens)))
                self.runner.write(group, placed, tokens, places)

    @precondition(lambda self: self.suspects)
    @rule()
    def transfers_end(self) -> None:
        blocks, self.suspects = self.suspects, set()
        self.is_idle = self.loop.run_step([lambda: self.loop.unquarantine(blocks)])

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.specs, key=str)))
        self.forget(key)
        self.is_idle = self.loop.run_step([lambda: self.loop.cancel(key)])

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        blocks, self.pinned = self.pinned, []
        self.is_idle = self.loop.run_step([lambda: self.loop.unpin(blocks)])

    @rule(seconds=st.sampled_from([0.0, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.is_idle = self.loop.run_step([])

    @rule()
    def run_until_idle(self) -> None:
        for _ in range(1000):
            if self.is_idle:
                before = self.loop.load
                assert self.loop.run_step([])
                assert self.loop.load == before, "there was something left to do"
                return
            self.is_idle = self.loop.run_step([])
        raise AssertionError("the loop does not come to rest")

    @invariant()
    def no_more_is_under_way_than_was_asked_for(self) -> None:
        assert len(self.runner.under_way) <= self.steps_ahead

    @invariant()
    def no_step_with_drafts_is_under_way(self) -> None:
        """Commands and admissions find the pages that rejected drafts released."""
        assert not any(chunk.drafts for step in self.runner.under_way for chunk, _, _ in step.chunks)

    @invariant()
    def what_a_peer_may_read_stays_as_it_is(self) -> None:
        for key, runs in self.lent.items():
            for group, run in enumerate(runs):
                assert self.loop._pool._refs.keys() >= set(run.blocks)
                self.runner.check(group, run, self.specs[key].token_ids, range(4 * run.first, 4 * run.end))

    @invariant()
    def the_living_are_those_who_should(self) -> None:
        assert set(self.loop.keys) == set(self.specs)

    def teardown(self) -> None:
        """Whatever happened: answer everybody, and all ends."""
        for _ in range(1000):
            for key in list(self.reserved):
                del self.reserved[key]
                self.loop.complete_kv(key, 0, None, ())
            for key in list(self.held):
                self.forget(key)
                self.loop.cancel(key)
            pinned, self.pinned = self.pinned, []
            answers = [partial(self.loop.unpin, pinned), partial(self.loop.unquarantine, self.suspects)]
            self.is_idle = self.loop.run_step(answers)
            if self.is_idle and not self.specs and not self.pinned:
                break
        assert self.specs == {}
        load = self.loop.load
        assert load.free_blocks + load.cached_blocks == self.config.num_blocks
        assert (load.num_running, load.num_waiting, load.active_tokens, load.queued_prefill_tokens) == (0, 0, 0, 0)
        assert self.speculator is None or not self.speculator.known


def foresee(sequence: Sequence, count: int) -> list[int]:
    """The next tokens of a sequence."""
    tokens = list(sequence.token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.token_ids) :]


class WindowsMachine(LoopMachine):
    """Some groups give pages back on the way."""

    config = WINDOWS


class BoundedMachine(LoopMachine):
    """No group sees everything."""

    config = BOUNDED


@pytest.mark.parametrize("machine", [LoopMachine, WindowsMachine, BoundedMachine])
def test_whatever_comes_in_whatever_order_all_ends_well(machine: type[LoopMachine], steps_ahead: int) -> None:
    bounds = settings(max_examples=NUM_PLAIN, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(type(machine.__name__, (machine,), {"steps_ahead": steps_ahead}), settings=bounds)


@pytest.mark.parametrize("share_right", [0.7] if NUM_DRAFTING < 100 else [0.0, 0.7, 1.0])
@pytest.mark.parametrize("machine", [LoopMachine, WindowsMachine, BoundedMachine])
def test_sequences_end_well_in_any_order_when_they_draft(
    machine: type[LoopMachine], share_right: float, steps_ahead: int
) -> None:
    bounds = settings(max_examples=NUM_DRAFTING, stateful_step_count=40, deadline=None)
    fields = {"steps_ahead": steps_ahead, "share_right": share_right}
    run_state_machine_as_test(type(machine.__name__, (machine,), fields), settings=bounds)


def test_a_prompt_whose_pages_another_holds_stands_still_until_they_are_back() -> None:
    config = replace(CONFIG, num_blocks=8, chunk_tokens=4, pin_sealed=False, spans=(AttentionSpan(window=8),))
    outputs: list[StepOutput] = []
    runner = CountingRunner(config)
    loop = EngineLoop(runner, config, outputs.append)
    prompt = [place % 3 for place in range(32)]
    keys = [RequestKey("first"), RequestKey("second")]
    specs = [SequenceSpec(key, tuple(prompt), SamplingParams(1), SequenceMode.PREFILL) for key in keys]
    for _ in range(3):
        loop.run_step([Sequence(specs[0], list(prompt), 0.0)] if not loop.keys else [])
    # it finds two pages that the first one is about to give back, and takes all that are left
    loop.run_step([Sequence(specs[1], list(prompt), 0.0)])
    assert (loop.load.free_blocks, loop.load.cached_blocks, loop.load.num_running) == (0, 0, 2)
    while not loop.run_step([]):
        pass
    told = [(delta.key, delta.token_ids) for output in outputs for delta in output.deltas]
    assert told == [(key, (next_token(prompt),)) for key in keys]
    # without pages the first one left its turn to the second, and came back to it
    turns = [key for key, _ in runner.chunks]
    assert turns.index(keys[1]) < len(turns) - 1 - turns[::-1].index(keys[0])
    assert [sum(count for key, count in runner.chunks if key == each) for each in keys] == [32, 32 - 12]


def test_a_prefill_that_lacks_only_the_page_of_its_last_token_waits_for_it(steps_ahead: int) -> None:
    """Nobody can make way for it: the other one is a prefill, too, and holds pages that the first one gave back."""
    config = replace(
        CONFIG, num_blocks=6 + steps_ahead, chunk_tokens=4, pin_sealed=False, spans=(AttentionSpan(window=6),)
    )
    outputs: list[StepOutput] = []
    loop = EngineLoop(CountingRunner(config), replace(config, steps_ahead=steps_ahead), outputs.append)
    first = [place % 3 for place in range(13 + 4 * steps_ahead)]
    second = first[: 4 + 4 * steps_ahead] + [9] * 9
    for name, prompt in (("first", first), ("second", second)):
        spec = SequenceSpec(RequestKey(name), tuple(prompt), SamplingParams(1), SequenceMode.PREFILL)
        loop.run_step([Sequence(spec, list(prompt), 0.0)])
    while not loop.run_step([]):
        pass
    told = {delta.key.request_id: delta.token_ids for output in outputs for delta in output.deltas}
    assert told == {"first": (next_token(first),), "second": (next_token(second),)}


def test_prompts_come_in_small_pieces_beside_those_who_generate_and_in_large_ones_alone() -> None:
    config = replace(CONFIG, num_blocks=30, max_context_tokens=80, chunk_tokens=12, mixed_tokens=5)
    runner = CountingRunner(config)
    loop = EngineLoop(runner, config, lambda output: None)
    prompts = {"writer": [1, 2, 3], "reader": [4] * 30, "late": [5] * 30}
    entering = {
        name: Sequence(SequenceSpec(RequestKey(name), tuple(prompt), sampling, SequenceMode.GENERATE), prompt, 0.0)
        for (name, prompt), sampling in zip(prompts.items(), map(SamplingParams, (14, 1, 1)), strict=True)
    }
    loop.run_step([entering["writer"]])
    for _ in range(MAX_FIRST_TOKENS):
        loop.run_step([])  # at its first tokens it would pause for the reader
    loop.run_step([entering["reader"]])
    while not loop.run_step([]):
        pass
    loop.run_step([entering["late"]])
    while not loop.run_step([]):
        pass
    pieces = {name: [count for key, count in runner.chunks if key.request_id == name] for name in prompts}
    assert pieces == {"writer": [3] + [1] * 13, "reader": [5] * 6, "late": [12, 12, 6]}


def test_a_prompt_waits_for_others_in_its_step_only_while_they_are_short() -> None:
    config = replace(CONFIG, num_blocks=40, max_context_tokens=80, chunk_tokens=12, mixed_tokens=5, max_num_seqs=9)
    runner = CountingRunner(config)
    loop = EngineLoop(runner, config, lambda output: None)
    lengths = (9, 20, 2, 2, 7, 3)
    sequences = []
    for number, length in enumerate(lengths):
        spec = SequenceSpec(RequestKey(f"{number}"), (number,) * length, SamplingParams(1), SequenceMode.PREFILL)
        sequences.append(Sequence(spec, list(spec.token_ids), 0.0))
    loop.run_step(sequences)
    while not loop.run_step([]):
        pass
    assert runner.steps == [[9], [12], [8], [2, 2, 1], [6], [3]]
