"""What a turn of the engine's loop costs beside the model, by how many sequences wait.

`python -m loadtest.engine.queue_cost`. No model: tokens are made up at once, and planning and settling are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Items

from weft.engine.config import EngineConfig
from weft.engine.loop import EngineLoop, Runner
from weft.engine.messages import PoolMemory, SequenceMode, SequenceSpec
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import SampledToken, ScheduledChunk
from weft.request import RequestKey, SamplingParams

RUNNING = 64
PROMPT_TOKENS, NEW_TOKENS = 64, 16
TURNS = 400


class Step:
    """Done already."""

    def __init__(self, works: Items[ScheduledChunk]) -> None:
        self.counts = [work.num_samples for work in works]

    def collect(self) -> list[list[SampledToken]]:
        """Return token 1 for every sampled position."""
        return [[SampledToken(1)] * count for count in self.counts]


class NoModel:
    """Computes nothing."""

    pool_memory = PoolMemory(0, 1, 1)

    def launch(self, works: Items[ScheduledChunk]) -> Step:
        """At once."""
        return Step(works)


def config_for(num_running: int, steps_ahead: int) -> EngineConfig:
    """With room for so many."""
    return EngineConfig(
        num_blocks=num_running * 8,
        block_tokens=16,
        vocab_size=100,
        max_context_tokens=256,
        max_num_seqs=num_running,
        steps_ahead=steps_ahead,
    )


def microseconds(num_waiting: int, config: EngineConfig, runner: Runner) -> float:
    """Median of a turn with all sequences that the engine takes, so many behind them; they come and go meanwhile."""
    loop = EngineLoop(runner, config, lambda output: None)
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    prompt = list(range(PROMPT_TOKENS))
    entering = []
    for number in range(num_waiting + TURNS * config.max_num_seqs // NEW_TOKENS):
        salt = number.to_bytes(4, "big")
        spec = SequenceSpec(RequestKey(salt.hex()), tuple(prompt), sampling, SequenceMode.GENERATE, salt)
        entering.append(Sequence(spec, list(prompt), float(number)))
    loop.run_step(entering)
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        loop.run_step([])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def main() -> None:
    """A line for each length of the queue."""
    print("waiting  plain loop, us a turn  one step ahead, us a turn")
    for num_waiting in (0, 100, 1000, 5000, 20_000):
        plain, ahead = (microseconds(num_waiting, config_for(RUNNING, steps), NoModel()) for steps in (0, 1))
        print(f"{num_waiting:7}  {plain:21.0f}  {ahead:25.0f}")


if __name__ == "__main__":
    main()
