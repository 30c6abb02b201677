"""Who goes first, who makes way, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.weft.engine.counting import CONFIG, CountingRunner
from weft.engine.loop import EngineLoop
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.sequence import Sequence
from weft.engine.wait_queue import LEVEL_SECONDS
from weft.kv.layer_groups import AttentionSpan
from weft.request import RequestKey, SamplingParams


class Played:
    """A loop under a clock of its own, and the order in which sequences began and ended."""

    def __init__(self, steps_ahead: int, **limits: Any) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.ended: list[str] = []
        config = replace(CONFIG, steps_ahead=steps_ahead, pin_sealed=False, **limits)
        self.loop = EngineLoop(CountingRunner(config), config, self.hear, lambda: self.now)

    def hear(self, output: StepOutput) -> None:
        for delta in output.deltas:
            name = delta.key.request_id
            if name not in self.begun:
                self.begun.append(name)
            if delta.finish_reason is not None:
                self.ended.append(name)

    def submit(self, name: str, priority: int, num_tokens: int = 1, prompt: int = 4, **changes: Any) -> None:
        """Without a turn."""
        fields = {"mode": SequenceMode.GENERATE, "priority": priority, "cache_salt": name.encode(), **changes}
        spec = SequenceSpec(RequestKey(name), (1,) * prompt, SamplingParams(num_tokens, ignore_eos=True), **fields)
        self.loop._add(Sequence(spec, list(spec.token_ids), self.now))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.run_step([])

    def run(self) -> None:
        while not self.loop.run_step([]):
            pass


def test_higher_priorities_go_first_and_equal_ones_in_the_order_they_came(steps_ahead: int) -> None:
    played = Played(steps_ahead, max_num_seqs=1)
    for name, priority in (("batch", -1), ("one", 0), ("urgent", 1), ("two", 0), ("urgent too", 1)):
        played.submit(name, priority)
    played.run()
    assert played.ended == ["urgent", "urgent too", "one", "two", "batch"]


def test_a_level_of_priority_is_worth_so_much_waiting_and_no_more(steps_ahead: int) -> None:
    """However many come, those a level higher overtake only if they come soon enough."""
    played = Played(steps_ahead, max_num_seqs=1)
    played.submit("patient", 0)
    for number in range(100):
        played.now = (number + 1) * LEVEL_SECONDS / 10
        played.submit(str(number), 1)
    played.run()
    overtaken_by = played.ended.index("patient")
    assert played.ended[:overtaken_by] == [str(number) for number in range(overtaken_by)]
    assert overtaken_by == 9  # the tenth came a whole level later


def test_prompts_of_higher_priority_are_computed_first(steps_ahead: int) -> None:
    played = Played(steps_ahead)
    played.submit("long", 0, prompt=12)
    played.submit("urgent", 1, prompt=12)
    played.run()
    assert played.begun == ["urgent", "long"]


def test_the_last_in_turn_is_preempted_when_blocks_run_out_however_long_it_has_run(steps_ahead: int) -> None:
    """9 blocks of 4: three texts of 16 tokens do not fit together."""
    played = Played(steps_ahead)
    for name, priority in (("batch", -1), ("urgent", 1), ("usual", 0)):
        played.submit(name, priority, num_tokens=12)
        played.turn(2)
    played.run()
    assert played.begun == ["batch", "urgent", "usual"]
    assert played.ended == ["urgent", "usual", "batch"]


def test_a_sequence_of_higher_priority_takes_the_seat_of_a_lower_one_and_gives_it_back(steps_ahead: int) -> None:
    played = Played(steps_ahead, max_num_seqs=2)
    played.submit("batch", -1, num_tokens=20)
    played.submit("usual", 0, num_tokens=20)
    played.turn(4)
    played.submit("urgent", 1, num_tokens=2)
    played.run()
    assert played.ended == ["urgent", "usual", "batch"]


def test_nobody_makes_way_where_that_would_not_be_room_enough(steps_ahead: int) -> None:
    played = Played(steps_ahead)
    played.submit("held", 1, prompt=20, mode=SequenceMode.PREFILL)
    played.turn(6)
    played.submit("batch", -1, num_tokens=8)
    played.turn(4)
    played.submit("urgent", 1, prompt=20)
    played.run()
    assert played.ended == ["batch"]
    played.loop.cancel(RequestKey("held"))
    played.run()
    assert played.ended == ["batch", "urgent"]


def test_equals_do_not_make_way_for_one_another(steps_ahead: int) -> None:
    played = Played(steps_ahead, max_num_seqs=1)
    played.submit("first", 0, num_tokens=10)
    played.turn(3)
    played.submit("second", 0)
    played.run()
    assert played.ended == ["first", "second"]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(steps_ahead: int) -> None:
    played = Played(steps_ahead, num_blocks=64)
    played.submit("long", 0, prompt=100)
    played.now = 1.0
    played.turn(2)
    played.submit("short", 0, prompt=4)
    played.now = 2.0
    played.run()
    assert played.begun == ["short", "long"]


def test_a_long_prompt_is_overtaken_for_so_long_and_no_longer(steps_ahead: int) -> None:
    """More short prompts come than can be computed; the long one's turn comes all the same."""
    played = Played(steps_ahead, num_blocks=64)
    played.submit("long", 0, prompt=32)
    while "long" not in played.begun and played.now < 2 * LEVEL_SECONDS:
        played.submit(f"at {played.now}", 0, prompt=8)
        played.now += 1.0
        played.turn()
    assert LEVEL_SECONDS < played.now < 1.5 * LEVEL_SECONDS


def test_a_short_prompt_does_not_overtake_a_long_one_of_higher_priority_that_came_with_it(steps_ahead: int) -> None:
    played = Played(steps_ahead)
    played.submit("short", 0, prompt=4)
    played.submit("urgent", 1, prompt=20)
    played.now = 1.0
    played.run()
    assert played.begun == ["urgent", "short"]


def test_what_lower_ones_share_is_room_once_and_what_higher_ones_share_with_them_is_none(steps_ahead: int) -> None:
    """20 blocks of 4, of which 6 hold what three have in common: the lower two give 4 back, not 16."""
    played = Played(steps_ahead, num_blocks=20, max_context_tokens=128)
    common: dict[str, Any] = {"cache_salt": b"common", "prompt": 25}
    played.submit("held", 1, num_tokens=20, **common)
    played.turn(12)
    for name in ("one", "two"):
        played.submit(name, 0, num_tokens=6, **common)
    played.turn(4)
    played.submit("urgent", 1, prompt=48)
    played.run()
    assert played.ended.index("one") < played.ended.index("urgent"), "it would have made way for nothing"
    assert played.ended.index("two") < played.ended.index("urgent")


def test_the_block_that_others_may_grow_into_is_no_room(steps_ahead: int) -> None:
    """9 blocks of 4: without the batch there were 5, of which one is the other's next."""
    played = Played(steps_ahead, num_blocks=9)
    played.submit("usual", 1, prompt=10, num_tokens=18)
    played.turn(3)
    played.submit("batch", 0, prompt=10, num_tokens=3)
    played.turn(2)
    played.submit("urgent", 1, prompt=20)
    played.run()
    assert played.ended[0] == "batch"


def test_a_windowed_text_that_made_way_goes_on_where_steps_are_no_longer_than_a_block(steps_ahead: int) -> None:
    """What a prompt of whole blocks keeps at its end, for whoever asks for it again, took the room of its text."""
    played = Played(steps_ahead, num_blocks=5, chunk_tokens=4 // (1 + steps_ahead), spans=(AttentionSpan(window=6),))
    played.submit("text", 0, num_tokens=8, prompt=16)
    while played.loop._postprocessor.num_generated_tokens < 5:
        played.turn()
    played.submit("urgent", 1, num_tokens=8, prompt=16)
    played.run()
    assert played.ended == ["urgent", "text"]


def test_a_text_that_makes_way_itself_leaves_its_pages_to_a_prompt_that_stands_still(
    steps_ahead: int,
) -> None:
    """It held pages that the prompt had given back, and nothing else would have made the loop go on."""
    limits: dict[str, Any] = {
        "num_blocks": 5,
        "chunk_tokens": 4 // (1 + steps_ahead),
        "spans": (AttentionSpan(window=6),),
    }
    played = Played(steps_ahead, **limits)
    played.submit("prompt", 0, prompt=14, mode=SequenceMode.PREFILL, cache_salt=b"")
    played.submit("text", 0, num_tokens=12, prompt=12, cache_salt=b"")
    played.run()
    assert "prompt" in played.begun
    played.loop.cancel(RequestKey("prompt"))
    played.run()
    assert played.ended == ["text"]


def test_what_those_who_made_way_leave_over_goes_to_a_prompt_that_stands_still() -> None:
    """Whom they made way for waits for its KV: until that comes nothing else makes the loop go on."""
    played = Played(0, num_blocks=8, chunk_tokens=4, spans=(AttentionSpan(window=6),))
    played.submit("other", 0, num_tokens=3, prompt=10)
    played.turn()
    played.submit("text", 0, num_tokens=3, prompt=10, cache_salt=b"")
    played.turn()
    played.submit("prompt", 1, prompt=17, cache_salt=b"", mode=SequenceMode.PREFILL)
    played.turn(4)
    played.submit("lent", 1, num_tokens=3, prompt=12, cache_salt=b"", wait_for_kv=True)
    played.run()
    assert "prompt" in played.begun
    assert not played.ended
