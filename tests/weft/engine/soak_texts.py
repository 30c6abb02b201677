"""What the soak asks for, and how each text goes on when nothing disturbs it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.weft.engine.harness import Driver
from tests.weft.engine.test_shaped import EveryThird
from tests.weft.tiny_llama import Tiny
from weft.request import SamplingParams

NUM_TEXTS, MAX_NEW = 24, 20
CHANGES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_k": 40}, {"repetition_penalty": 1.3, "min_tokens": 4}]


@dataclass(frozen=True)
class Text:
    """A prompt, how it is to go on, and how it does so alone."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: list[int]
    is_constrained: bool


def make_texts(tiny: Tiny) -> list[Text]:
    """Greedy texts as transformers writes them; others as a clean engine does, one after the other."""
    source = random.Random(5)
    texts = []
    with Driver(tiny, num_blocks=256) as alone:
        for index in range(NUM_TEXTS):
            shared = [17, 4, 99, 23, 8] * source.randrange(3)  # some begin alike, and hit each other's blocks
            prompt = shared + [source.randrange(3, 110) for _ in range(source.randrange(1, 22))]
            changes, is_constrained = CHANGES[index % len(CHANGES)], index % 4 == 3
            sampling = SamplingParams(MAX_NEW, seed=index, ignore_eos=True, **changes)
            if changes or is_constrained:
                constraint = EveryThird(tiny.config.vocab_size) if is_constrained else None
                heard = alone.generate(prompt, MAX_NEW, str(index), seed=index, constraint=constraint, **changes)
                expected = heard.tokens
            else:
                expected = tiny.greedy(prompt, MAX_NEW)
            texts.append(Text(tuple(prompt), sampling, expected, is_constrained))
    return texts
