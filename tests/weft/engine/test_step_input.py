"""Steps as numbers: a second executor repeats the first one's steps, and one chunk samples at several positions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.weft.tiny_llama import Tiny
from weft.engine.config import EngineConfig
from weft.engine.device_copier import DeviceCopier
from weft.engine.executor import ModelExecutor
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.engine.runner import ModelRunner, StepInputBuilder
from weft.engine.sequence import Sequence
from weft.engine.step_input import StepInput
from weft.engine.step_scheduler import SampledToken, ScheduledChunk
from weft.kv.layer_groups import PageRange
from weft.model.decoder import Decoder
from weft.model.kv_layout import kv_groups
from weft.request import RequestKey, SamplingParams

CPU = torch.device("cpu")
PROMPT = [5, 9, 14, 3, 77, 21, 40, 8, 8, 30, 61, 2, 19, 55, 6, 90, 33]
NUM_NEW = 9


class OddTokens:
    """Constraint that allows every second token, in turns: odd ones, then even ones."""

    failure = None

    def __init__(self) -> None:
        self.num_accepted = 0

    def accept(self, token_ids: Any) -> None:
        self.num_accepted += len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens

    def valid(self, token_ids: Any) -> int:
        return len(token_ids)

    def forced(self) -> list[int]:
        return []

    def fill(self, words: NDArray[np.int32]) -> None:
        words.fill(0x55555555 if self.num_accepted % 2 else -1431655766)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded with logprobs": {"temperature": 0.9, "seed": 11, "top_p": 0.95, "num_logprobs": 3},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (1, 2, 3), "logit_bias": ((2, 30.0),)},
    "grammar": {"temperature": 1.0, "seed": 5},
}


def config_of(tiny: Tiny) -> EngineConfig:
    return EngineConfig(
        num_blocks=16,
        block_tokens=8,
        vocab_size=tiny.config.vocab_size,
        max_context_tokens=tiny.config.max_positions,
        eos_token_ids=tiny.config.eos_token_ids,
        spans=kv_groups(tiny.config).spans,
    )


def decoder_of(tiny: Tiny) -> Decoder:
    return Decoder(tiny.config, tiny.weights, torch.float32, CPU)


def sequence_of(first_page: int, name: str = "greedy", tokens: list[int] | None = None) -> Sequence:
    """A sequence with pages for 64 tokens."""
    sampling = SamplingParams(64, ignore_eos=True, **SAMPLING[name])
    constraint = OddTokens() if name == "grammar" else None
    spec = SequenceSpec(RequestKey(name), tuple(PROMPT), sampling, SequenceMode.GENERATE, constraint=constraint)
    pages = PageRange(0, tuple(range(first_page, first_page + 8)))
    return Sequence(spec, tokens or list(PROMPT), 0.0, page_ranges=[pages])


def step(runner: ModelRunner, chunk: ScheduledChunk) -> tuple[SampledToken, ...]:
    (tokens,) = runner.launch([chunk]).collect()
    return tokens


def generate(runner: ModelRunner, sequence: Sequence) -> list[SampledToken]:
    """Step one token at a time."""
    start, found = 0, list[SampledToken]()
    for _ in range(NUM_NEW):
        end = len(sequence.token_ids)
        found += step(runner, ScheduledChunk(sequence, start, end - start, num_samples=1))
        sequence.token_ids.append(found[-1].token_id)
        start = end
    return found


@pytest.mark.parametrize("name", SAMPLING)
def test_several_samples_equal_single_steps(grouped: Tiny, name: str) -> None:
    runner = ModelRunner(decoder_of(grouped), config_of(grouped), "float32", CPU)
    single = generate(runner, sequence_of(0, name))
    tokens = PROMPT + [each.token_id for each in single]
    several = sequence_of(8, name, tokens)
    # The end of the prompt and 2 tokens, then 4 tokens alone, then the rest: as if all drafts were right.
    start, found = 0, list[SampledToken]()
    for num_samples in (3, 4, 2):
        end = len(PROMPT) + len(found) + num_samples - 1
        found += step(runner, ScheduledChunk(several, start, end - start, num_samples))
        start = end
    assert [each.token_id for each in found] == [each.token_id for each in single]
    for one, other in zip(found, single, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs and other.logprobs:
            assert one.logprobs.chosen.logprob == pytest.approx(other.logprobs.chosen.logprob, abs=1e-4)


def test_results_follow_the_order_of_the_chunks(grouped: Tiny) -> None:
    runner = ModelRunner(decoder_of(grouped), config_of(grouped), "float32", CPU)
    tokens = PROMPT + [each.token_id for each in generate(runner, sequence_of(0))]
    long, short = sequence_of(0, tokens=tokens), sequence_of(8, tokens=PROMPT[:5])
    chunks = [
        ScheduledChunk(long, len(PROMPT) + 1, 3, num_samples=2),
        ScheduledChunk(short, 0, 4, num_samples=0),
        ScheduledChunk(sequence_of(0, tokens=tokens), len(tokens) - 2, 1, num_samples=1),
    ]
    several, none, one = runner.launch(chunks).collect()
    assert [each.token_id for each in several] == tokens[len(PROMPT) + 3 : len(PROMPT) + 5]
    assert (none, one[0].token_id) == ((), tokens[-1])


def over_the_wire(step_input: StepInput) -> StepInput:
    """Serialise to text and back, which only numbers survive."""
    fields = asdict(step_input)
    fields["rows"] = fields["rows"].tolist()
    fields = json.loads(json.dumps(fields))
    fields["rows"] = np.array(fields["rows"], dtype=np.int64)
    fields["tables"] = [[tuple(table) for table in tables] for tables in fields["tables"]]
    return StepInput(**fields)


def test_a_second_executor_repeats_steps_from_numbers(grouped: Tiny) -> None:
    config, builder = config_of(grouped), StepInputBuilder(config_of(grouped).paging)
    leader, follower = (ModelExecutor(decoder_of(grouped), config, "float32", DeviceCopier(CPU)) for _ in range(2))
    follower.pool.memory.fill_(float("nan"))  # only pages that a step begins are zeroed
    follower.pool.memory[:2] = 0  # the first chunk fills these
    sequence, start = sequence_of(0), 0
    sampled = torch.zeros(0, dtype=torch.int64)
    for num_tokens in (len(PROMPT), 1, 1, 1):
        # From the second step on, the token is pending: only the previous step's samples hold it.
        step_input = builder.build([ScheduledChunk(sequence, start, num_tokens, num_samples=1)])
        assert len(step_input.pending_tokens) == (num_tokens == 1)
        logits, _ = leader.forward(step_input, sampled)
        repeated, _ = follower.forward(over_the_wire(step_input), sampled)
        torch.testing.assert_close(repeated, logits, atol=0, rtol=0)
        if num_tokens == 1:
            sequence.token_ids.append(int(sampled[0]))
        sampled, start = logits.argmax(-1), start + num_tokens
    torch.testing.assert_close(follower.pool.memory[:3], leader.pool.memory[:3], atol=0, rtol=0)
