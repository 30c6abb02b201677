"""Finds out what the layer ids of a draft head mean, by how often the head agrees with its target on a text.

A wrong reading runs without an error and costs most of the speed, so all readings are tried when a head is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel, DraftRows
from weft.model.draft_layers import Boundaries
from weft.model.kv_layout import block_bytes, group_heads, page_numbers
from weft.model.paged_pool import paged_pool
from weft.model.step import Capture, TokenBatch
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedBatch

# Far below any useful head, far above a head that reads other states than it was trained on.
MIN_AGREEMENT = 0.15
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ScoringText:
    """A prompt and the target's own answer, T tokens in all, as the target sees them.

    Only the answer counts, from token `answer_start` on: on other text the readings hardly differ. A half-trained head
    of weft-nano agreed on 88% of its answers, with wrong readings on 84% and 79%; on prompts it was 27% to 25%.

    - `states`: by boundary, the residual stream [T, hidden], see `weft.model.step.Capture`.
    - `token_ids` [T], and `choices` [T]: the target's most likely next token after each.
    """

    states: Mapping[int, Tensor]
    token_ids: Tensor
    choices: Tensor
    answer_start: int = 1


@dataclass(frozen=True, slots=True)
class ReadingScore:
    """Share of the tokens for which draft and target choose the same next token, between 0 and 1."""

    name: str
    boundaries: Boundaries
    agreement: float


def answer(
    target: Decoder, prompts: Sequence[Sequence[int]], boundaries: Collection[int], num_tokens: int
) -> list[ScoringText]:
    """Return each prompt with up to `num_tokens` that the target chooses after it, and its states at these boundaries.

    An answer has at least one token, and ends before the first end token behind that.
    """
    wanted, context = tuple(boundaries), _Context(target, len(prompts), max(map(len, prompts)) + num_tokens)
    texts, choices = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
    states = [list[Tensor]() for _ in prompts]
    for step in range(num_tokens + 1):
        counts = [len(text) - len(chosen) for text, chosen in zip(texts, choices, strict=True)]
        rows, batches = context.rows(texts, counts)
        out = torch.empty(sum(counts), len(wanted), target.config.hidden_size, dtype=target.dtype, device=target.device)
        with torch.inference_mode():
            chosen = target.logits(target.hidden(rows, batches, Capture(wanted, out))).argmax(-1)
        for index, (state, ids) in enumerate(zip(torch.split(out, counts), torch.split(chosen, counts), strict=True)):
            states[index].append(state)
            choices[index] += ids.tolist()
            if step < num_tokens:
                texts[index].append(choices[index][-1])
    ends = set(target.config.eos_token_ids)
    found = []
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        size = next((at for at in range(len(prompt) + 1, len(text)) if text[at] in ends), len(text))
        of_boundary = dict(zip(wanted, torch.cat(states[index])[:size].unbind(1), strict=True))
        ids, chosen = (torch.tensor(each[:size], device=target.device) for each in (text, choices[index]))
        found.append(ScoringText(of_boundary, ids, chosen, len(prompt)))
    return found


class _Context:
    """Pages for sequences of up to `size` tokens. Each sequence has its own in each group of layers."""

    def __init__(self, target: Decoder, num_sequences: int, size: int) -> None:
        config, self._device = target.config, target.device
        self._heads, self._num_sequences = group_heads(config), num_sequences
        self._num_pages = -(-size // BLOCK_TOKENS)
        shape = len(self._heads) * num_sequences * self._num_pages, page_numbers(config) * BLOCK_TOKENS
        self._pool = paged_pool(config, torch.zeros(shape, dtype=target.dtype, device=target.device), BLOCK_TOKENS)

    def rows(self, texts: Sequence[list[int]], counts: Sequence[int]) -> tuple[TokenBatch, list[PagedBatch]]:
        """Return the last `counts` tokens of the texts, which all have logits."""
        positions = [range(len(text) - count, len(text)) for text, count in zip(texts, counts, strict=True)]
        starts = list(accumulate(counts, initial=0))
        slots, batches = [], []
        for group, heads in enumerate(self._heads):
            first = group * self._num_sequences
            tables = [self._pages(first + index) for index in range(len(texts))]
            slots.append([t[0] * BLOCK_TOKENS + at for t, run in zip(tables, positions, strict=True) for at in run])
            batches.append(PagedBatch(self._pool, heads, starts, [len(text) for text in texts], tables))
        ids = [text[at] for text, run in zip(texts, positions, strict=True) for at in run]
        rows = ids, [at for run in positions for at in run], slots, list(range(len(ids)))
        return TokenBatch(*(torch.tensor(each, device=self._device) for each in rows)), batches

    def _pages(self, index: int) -> range:
        return range(index * self._num_pages, (index + 1) * self._num_pages)


def score_readings(
    head: DraftModel, texts: Sequence[ScoringText], candidates: Mapping[str, Boundaries]
) -> list[ReadingScore]:
    """Return the scores of all candidates in their order."""
    matches = {name: torch.cat([_matches(head, text, each) for text in texts]) for name, each in candidates.items()}
    return [ReadingScore(name, each, float(matches[name].float().mean())) for name, each in candidates.items()]


def best_reading(scores: list[ReadingScore], name: str) -> ReadingScore:
    """Return the best score, the first one of equal ones. Raises BadCheckpoint if even that is no use.

    name: what the message calls the head.
    """
    best = max(scores, key=lambda each: each.agreement)
    if best.agreement < MIN_AGREEMENT:
        found = ", ".join(f"{each.name} {list(each.boundaries)} {each.agreement:.0%}" for each in scores)
        what = f"agrees with the target on at most {best.agreement:.0%} of the tokens, expected {MIN_AGREEMENT:.0%}"
        raise BadCheckpoint(f"{name}: {what} ({found}); take the head of this model, or set --draft-layers")
    return best


def _matches(head: DraftModel, text: ScoringText, boundaries: Boundaries) -> Tensor:
    """Return for each token of the answer whether the draft equals the target's choice.

    Row k pairs the states of token k with token k+1, and predicts what follows that.
    """
    features = torch.stack([text.states[each][:-1] for each in boundaries], dim=1)
    rows, batches = _packed(head, text.token_ids[1:], features.dtype)
    with torch.inference_mode():
        drafted = head.target_ids(head.logits(head.forward(head.fuse(features), rows, batches)).argmax(-1))
    return (drafted == text.choices[1:])[text.answer_start - 1 :]


def _packed(head: DraftModel, token_ids: Tensor, dtype: torch.dtype) -> tuple[DraftRows, list[PagedBatch]]:
    """Return the rows of a sequence and a pool of their own, with the head's layer at its place."""
    config, (group, layer), count = head.config, head.place, len(token_ids)
    pages, device = range(-(-count // BLOCK_TOKENS)), token_ids.device
    items = block_bytes(config, "bfloat16", BLOCK_TOKENS) // 2
    memory, slots = torch.zeros(len(pages), items, dtype=dtype, device=device), torch.arange(count, device=device)
    caches = paged_pool(config, memory, BLOCK_TOKENS).layers
    pool = PagedPool(memory, caches * (layer + 1))
    batch = PagedBatch(pool, config.num_heads, [0, count], [count], [pages])
    return DraftRows(token_ids, slots + 1, slots.expand(group + 1, -1).contiguous()), [batch] * (group + 1)
