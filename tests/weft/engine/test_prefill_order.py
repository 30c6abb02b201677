"""Bursts: requests that arrive together start together, and pause only at their first tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise

from tests.weft.engine.counting import CONFIG, Counted, CountingRunner
from weft.engine.loop import EngineLoop
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import ScheduledChunk
from weft.engine.wait_queue import MAX_FIRST_TOKENS, MAX_PAUSE_SECONDS
from weft.request import RequestKey, SamplingParams

# a burst has at most 48 tokens: two steps
LIMITS = replace(
    CONFIG,
    num_blocks=200,
    max_context_tokens=200,
    chunk_tokens=12,
    mixed_tokens=5,
    burst_tokens=24,
    max_num_seqs=16,
    pin_sealed=False,
)


class TimedRunner(CountingRunner):
    """A device on which a step takes `row_seconds` for each of its rows."""

    now = 1000.0
    row_seconds = 0.001

    def launch(self, chunks: Items[ScheduledChunk]) -> Counted:
        """Note the step, and let its time pass."""
        self.now += self.row_seconds * sum(chunk.num_tokens for chunk in chunks)
        return super().launch(chunks)


class Scene:
    """A loop on a timed runner, and when each sequence had its tokens."""

    def __init__(self, row_seconds: float = 0.001) -> None:
        self.runner = TimedRunner(LIMITS)
        self.runner.row_seconds = row_seconds
        self.times: dict[str, list[float]] = {}
        self.loop = EngineLoop(self.runner, LIMITS, self.hear, lambda: self.runner.now)

    def hear(self, output: StepOutput) -> None:
        for delta in output.deltas:
            self.times.setdefault(delta.key.request_id, []).append(self.runner.now)

    def sequence(
        self, name: str, prompt: int, priority: int = 0, mode: SequenceMode = SequenceMode.GENERATE
    ) -> Sequence:
        tokens = tuple(name.encode()[-1] % 50 for _ in range(prompt))
        spec = SequenceSpec(
            RequestKey(name), tokens, SamplingParams(8, ignore_eos=True), mode, name.encode(), priority=priority
        )
        return Sequence(spec, list(tokens), self.runner.now)

    def submit(self, *names: str, prompt: int = 6, priority: int = 0) -> None:
        self.loop.run_step([self.sequence(name, prompt, priority) for name in names])

    def run(self) -> None:
        while not self.loop.run_step([]):
            pass

    def num_pauses(self) -> int:
        """Gaps between tokens in which a prompt was computed."""
        rows = self.runner.row_seconds * LIMITS.max_num_seqs
        return sum(after - before > rows for times in self.times.values() for before, after in pairwise(times))


def test_burst_starts_in_few_groups_and_generates_undisturbed() -> None:
    scene = Scene()
    scene.submit("a")
    scene.submit(*"bcdefgh", prompt=6)
    scene.run()
    assert scene.runner.steps[:4] == [[6], [6, 6, 6], [6, 6, 6, 6], [1] * 8]
    # 42 tokens wait after the first step: two even steps of whole prompts
    assert scene.num_pauses() <= 4
    assert all(len(times) == 8 for times in scene.times.values())


def test_sequence_past_its_first_tokens_is_never_paused() -> None:
    scene = Scene()
    scene.submit("a")
    for _ in range(MAX_FIRST_TOKENS):
        scene.loop.run_step([])
    scene.submit("b", "c", prompt=12)
    scene.run()
    longest = max(after - before for before, after in pairwise(scene.times["a"]))
    assert longest <= 2 * scene.runner.row_seconds * (LIMITS.mixed_tokens + 3)  # one step ahead, two steps lie between


def test_pause_ends_after_its_limit() -> None:
    scene = Scene(row_seconds=MAX_PAUSE_SECONDS / 20)
    scene.submit("a")
    scene.submit(*"bcd", prompt=12)  # two steps, the first of which takes more than the limit
    scene.run()
    paused, longest = 24 * scene.runner.row_seconds, max(b - a for a, b in pairwise(scene.times["a"]))
    assert paused <= longest < 2 * paused


def test_burst_longer_than_two_steps_is_mixed() -> None:
    scene = Scene()
    scene.submit("a")
    scene.submit(*"bcdefghij", prompt=12)
    assert scene.runner.steps[1] == [1, 5]


def test_urgent_request_does_not_wait_for_a_burst() -> None:
    scene = Scene()
    scene.loop.run_step([scene.sequence("slow", 12), scene.sequence("fast", 12, priority=1)])
    scene.run()
    assert scene.times["fast"][0] < scene.times["slow"][0]
    assert scene.runner.steps[0] == [12]


def test_prefill_worker_computes_one_prompt_after_the_other() -> None:
    scene = Scene()
    scene.loop.run_step([scene.sequence(name, 6, mode=SequenceMode.PREFILL) for name in "abc"])
    scene.run()
    assert scene.runner.steps == [[6], [6], [6]]
