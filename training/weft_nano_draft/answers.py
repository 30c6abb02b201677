"""Makes training text: dialogues whose assistant turns Weft Nano itself has generated.

A head learns the target's own words, so each turn of a made dialogue is generated again by the engine. One dialogue in
five is sampled at temperature 0.7; the others are greedy.
`python -m training.weft_nano_draft.answers --out DIR` writes one shard after the other.
"""

from __future__ import annotations

import argparse
import queue
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from training.weft_nano.corpus import Encoder, Example
from training.weft_nano.dialogues import Style, make_dialogue
from training.weft_nano.entities import Source
from training.weft_nano.tokenizer import MAX_TOKENS, load_tokenizer
from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.model.config import read_config
from weft.request import RequestKey, SamplingParams

BLOCK_TOKENS, NUM_BLOCKS = 16, 12_000
MAX_ANSWER_TOKENS = 200
SAMPLED_SHARE, TEMPERATURE = 0.2, 0.7
STYLES: tuple[Style, ...] = ("mixed", "errands", "choices", "session")
STYLE_WEIGHTS = (45, 25, 20, 10)


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens of a dialogue; `is_answer` marks those that the target generated, end tokens included."""

    token_ids: np.ndarray
    is_answer: np.ndarray


@dataclass(slots=True)
class _Turns:
    """A dialogue in progress: `token_ids` so far, and the index of the turn that comes next."""

    example: Example
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    turn: int = 0

    def open_turn(self) -> bool:
        """Append the text up to the next assistant turn; return False after the last turn."""
        spans = self.example.spans
        start = spans[self.turn - 1][1] if self.turn else 0
        end = spans[self.turn][0] if self.turn < len(spans) else len(self.example.token_ids)
        if self.turn == len(spans) or len(self.token_ids) + end - start + MAX_ANSWER_TOKENS > MAX_TOKENS:
            return False
        self._append(self.example.token_ids[start:end], False)
        self.turn += 1
        return True

    def add_answer(self, token_ids: tuple[int, ...]) -> None:
        self._append(list(token_ids), True)

    def _append(self, token_ids: list[int], is_answer: bool) -> None:
        self.token_ids += token_ids
        self.is_answer += [is_answer] * len(token_ids)

    def finish(self) -> Answered:
        return Answered(np.array(self.token_ids, np.uint16), np.array(self.is_answer, np.bool_))


class Target:
    """Weft's engine with Weft Nano, in bfloat16."""

    def __init__(self, checkpoint: Path, max_num_seqs: int) -> None:
        config = read_config(checkpoint)
        limits = EngineConfig(
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_positions,
            chunk_tokens=1024,
            max_num_seqs=max_num_seqs,
        )
        self.max_num_seqs = max_num_seqs
        self._outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._engine = build_engine(
            config,
            load_file(checkpoint / "model.safetensors"),
            dtype="bfloat16",
            device="cpu",
            engine_config=limits,
            listener=self._outputs.put,
            is_resident=True,
        )
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def answer(self, examples: Iterator[tuple[Example, SamplingParams]]) -> Iterator[Answered]:
        """Yield each dialogue with its turns generated one after the other; many dialogues run at once."""
        active: dict[str, _Turns] = {}
        number = 0
        while True:
            while len(active) < self.max_num_seqs:
                drawn = next(examples, None)
                if drawn is None:
                    break
                turns, number = _Turns(*drawn), number + 1
                if turns.open_turn():
                    active[str(number)] = turns
                    self._submit(str(number), turns)
            if not active:
                return
            yield from self._advance(active)

    def _submit(self, name: str, turns: _Turns) -> None:
        key = RequestKey(name, turns.turn)
        self._engine.submit(SequenceSpec(key, tuple(turns.token_ids), turns.sampling, SequenceMode.GENERATE))

    def _advance(self, active: dict[str, _Turns]) -> Iterator[Answered]:
        output = self._outputs.get(timeout=600)
        if output.failures:
            raise output.failures[0].error
        for delta in output.deltas:
            name = delta.key.request_id
            turns = active[name]
            turns.add_answer(delta.token_ids)
            if delta.finish_reason is None:
                continue
            # An answer that hit the limit has no end token: the dialogue stops there.
            if delta.finish_reason == "stop" and turns.open_turn():
                self._submit(name, turns)
            else:
                yield active.pop(name).finish()


def draw_examples(encoder: Encoder, source: Source, max_tokens: int) -> Iterator[tuple[Example, SamplingParams]]:
    """Yield dialogues of all styles and of 96 to `max_tokens` tokens, and how their answers are sampled."""
    while True:
        style = source.rng.choices(STYLES, STYLE_WEIGHTS)[0]
        example = encoder.encode(make_dialogue(source, source.rng.randint(96, max_tokens), style))
        yield (
            example,
            SamplingParams(
                MAX_ANSWER_TOKENS,
                TEMPERATURE if source.chance(SAMPLED_SHARE) else 0.0,
                seed=source.rng.getrandbits(32),
                stop_token_ids=(encoder.eos_id,),
            ),
        )


def write_shard(path: Path, dialogues: list[Answered]) -> None:
    temporary = path.with_suffix(".part.npz")
    np.savez(
        temporary,
        token_ids=np.concatenate([each.token_ids for each in dialogues]),
        is_answer=np.concatenate([each.is_answer for each in dialogues]),
        lengths=np.array([len(each.token_ids) for each in dialogues]),
    )
    temporary.replace(path)


def read_shard(path: Path) -> list[Answered]:
    with np.load(path) as shard:
        ends = np.cumsum(shard["lengths"])[:-1]
        pairs = zip(np.split(shard["token_ids"], ends), np.split(shard["is_answer"], ends), strict=True)
        return [Answered(token_ids, is_answer) for token_ids, is_answer in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/weft-nano"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--dialogues", type=int, default=512, help="in each shard")
    parser.add_argument("--max-tokens", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--held-out", action="store_true", help="use the values that training never sees")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    source = Source(random.Random(f"draft {options.seed} {options.held_out}"), options.held_out)
    encoder = Encoder(load_tokenizer(options.checkpoint))
    target = Target(options.checkpoint, options.batch)
    answered = target.answer(draw_examples(encoder, source, options.max_tokens))
    for number in range(options.shards):
        start = time.monotonic()
        shard = [next(answered) for _ in range(options.dialogues)]
        write_shard(options.out / f"{number:03}.npz", shard)
        tokens = sum(len(each.token_ids) for each in shard)
        answers = sum(int(each.is_answer.sum()) for each in shard)
        seconds = time.monotonic() - start
        print(f"shard {number} tokens {tokens} answers {answers} tokens/s {tokens / seconds:.0f}", flush=True)
    target.stop()


if __name__ == "__main__":
    main()
