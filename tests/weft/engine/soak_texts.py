"""What the soak asks for, of which models, and how each text goes on when nothing disturbs it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.weft.engine.harness import Driver
from tests.weft.engine.test_logits_processor import EveryThird
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import Reserved, SequenceSpec
from weft.request import SamplingParams

NUM_TEXTS, MAX_NEW = 24, 20
# Heads and rows that fill whole vectors, so that the C++ kernels take them.
SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**SMALL, "num_hidden_layers": 1},
    "mistral-window": {**SMALL, "num_hidden_layers": 1},
    "llama4": {
        **SMALL,
        "num_hidden_layers": 2,
        "intermediate_size_mlp": 32,
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
    },
    "deepseek": {"num_hidden_layers": 2},
}
CHANGES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_k": 40}, {"repetition_penalty": 1.3, "min_tokens": 4}]


@dataclass(frozen=True)
class Text:
    """A prompt, how it is to go on, and how it does so alone."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: list[int]
    is_constrained: bool


@dataclass
class Live:
    """A sequence under way: what it is, and what has been said about it."""

    text: Text
    spec: SequenceSpec
    tokens: list[int] = field(default_factory=list)
    reserved: Reserved | None = None  # until it has been filled
    num_bare: int = 0  # of its prompt

    @property
    def awaited(self) -> list[int]:
        """All that it is to say."""
        sampling = self.spec.sampling
        tokens = self.text.expected[self.spec.resumed_tokens : sampling.max_tokens]
        stops = [at for at, token in enumerate(tokens, 1) if token in sampling.stop_token_ids]
        return tokens[: stops[0]] if stops else tokens


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
