"""transformers on the same checkpoint: the greedy tokens that the mesh must give, and real prompts to ask with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.mesh.conftest import MODEL

TEXT = (
    "You are a helpful assistant. The user's locker code is 4821 and the meeting with Dana is on Thursday at 14:30. "
    "A shipment of 36 crates left Lisbon on Monday; crate seven holds the blue lamp, crate nine the spare keys. "
    "Please call the weather tool for Oslo, then set a timer for twelve minutes and note the answer down. "
)
# below are special tokens
FIRST_ORDINARY = 300
# logits that lie closer together stand in the order in which sums were rounded: float32 has 7 digits, they are about 10
TIE = 2e-5


@cache
def _model(directory: Path) -> Any:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@cache
def text_ids() -> tuple[int, ...]:
    """About 500 tokens of plain text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return tuple(tokenizer.encode(TEXT * 6).ids)


def prompts(count: int, shortest: int, longest: int, salt: int) -> list[list[int]]:
    """Prompts of evenly spread lengths. Their first tokens say salt and index, so no two share a block."""
    ids, step = text_ids(), (longest - shortest) / max(1, count - 1)
    lengths = [round(shortest + step * index) for index in range(count)]
    return [
        [FIRST_ORDINARY + salt, FIRST_ORDINARY + index, *ids, *ids][:length] for index, length in enumerate(lengths)
    ]


def greedy(prompt: list[int], num_tokens: int, directory: Path = MODEL) -> list[int]:
    """The next tokens by arg max, running past the end token."""
    return list(_greedy(tuple(prompt), num_tokens, directory))


@cache
@torch.inference_mode()
def _greedy(prompt: tuple[int, ...], num_tokens: int, directory: Path) -> tuple[int, ...]:
    output = _model(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(int(token) for token in output[0, len(prompt) :])


@torch.inference_mode()
def unlikely(prompt: list[int], tokens: list[int], directory: Path = MODEL) -> dict[int, float]:
    """Places of tokens that greedy would not give after those before them, and by how much another's logit is higher.

    All at once, which takes much less time than to generate them. Where two tokens are equally likely to the last
    digit, either will do: of a hundred answers of 600 tokens every one or two have such a place.
    """
    logits = _model(directory)(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    short = logits.amax(dim=-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return {place: by for place, by in enumerate(short.tolist()) if by > TIE}


@torch.inference_mode()
def logprobs(tokens: list[int], directory: Path = MODEL) -> torch.Tensor:
    """[len(tokens), vocab]: what is expected after each of them."""
    found: torch.Tensor = _model(directory)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found


@torch.inference_mode()
def mean_hidden(prompt: list[int], directory: Path = MODEL) -> list[float]:
    """The mean of the last hidden states, of length 1."""
    states = _model(directory)(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    vector: list[float] = torch.nn.functional.normalize(states.mean(0), dim=0).tolist()
    return vector
