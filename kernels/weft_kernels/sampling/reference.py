"""Meaning of sampling: the filters in the order of transformers, then a race between the tokens that are left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.sampling.noise import gumbels


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters, one entry per row.

    temperature [R] float32 (0: greedy), top_k [R] int64 (0: off), top_p [R] float64 (1: off), min_p [R] float32 (0:
    off), seeds [R] int64, positions [R] int64 (position of the new token). `has_top_k` and `has_top_p` summarise all
    rows, so that the host reads nothing back from a device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    has_top_k: bool
    has_top_p: bool

    def select(self, places: Tensor) -> SamplingRows:
        """Return the parameters of some rows, [n] int64, on a CPU."""
        top_k, top_p = self.top_k[places], self.top_p[places]
        others = self.min_p[places], self.seeds[places], self.positions[places]
        cuts = bool((top_k > 0).any()), bool((top_p < 1).any())
        return SamplingRows(self.temperature[places], top_k, top_p, *others, *cuts)


NEVER = float("-inf")


def sample_reference(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None = None) -> Tensor:
    best = logits.argmax(-1)
    greedy = best if token_ids is None else token_ids[best].long()
    return torch.where(rows.temperature > 0, race(logits, rows, token_ids), greedy)


def race(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None = None) -> Tensor:
    """Return the token of each row, [R] int64, with the largest sum of score and noise; the lowest of equal ones.

    For greedy rows the token is arbitrary. `token_ids` [V] int32: see `sample_drafts`.
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids.long()
    scores = filtered_scores(logits, rows)
    return tokens[(scores + gumbels(rows.seeds, rows.positions, tokens)).argmax(-1)]


def filtered_scores(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return [R, V] logits over temperature; -inf for tokens that a filter drops. Greedy rows use temperature 1."""
    scores = _scores(logits, rows)
    return scores.masked_fill(scores < floors(logits, rows)[:, None], NEVER)


def floors(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return [R] float32: the lowest score that the filters of each row keep."""
    floor = torch.log(rows.min_p)  # ln 0 = -inf drops nothing
    if rows.has_top_k or rows.has_top_p:
        floor = torch.maximum(floor, _worst_kept(_scores(logits, rows), rows))
    return floor


def _scores(logits: Tensor, rows: SamplingRows) -> Tensor:
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    # Relative to the best logit: a tiny temperature gives -inf for the others, never inf - inf.
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def _worst_kept(scores: Tensor, rows: SamplingRows) -> Tensor:
    """Return [R]: the lowest score that top-k, then top-p keep; scores that tie with it stay. Overwrites `scores`."""
    ordered, num_items = _sort(scores), scores.shape[-1]  # worst first
    num_kept = torch.where(rows.top_k > 0, rows.top_k, num_items).clamp_max(num_items)
    worst_kept = ordered.gather(-1, num_items - num_kept[:, None])
    if rows.has_top_p:
        if rows.has_top_k:
            ordered = ordered.masked_fill(ordered < worst_kept, NEVER)
        is_tail = ordered.softmax(-1).cumsum(-1) <= (1.0 - rows.top_p).float()[:, None]
        # The sums never fall, so the tail is a prefix: its length is the place of the first score behind it. Counting
        # takes a fifth of the time of masking the tail. The best score always stays.
        num_cut = torch.where(rows.top_p < 1.0, is_tail.sum(-1).clamp_max(num_items - 1), 0)
        worst_kept = torch.maximum(worst_kept, ordered.gather(-1, num_cut[:, None]))
    return worst_kept[:, 0]


def _sort(scores: Tensor) -> Tensor:
    """Return the scores in ascending order, on a CPU in place.

    There numpy takes 0.08 ms for 32 x 2048, torch 4.9, because it also sorts positions.
    """
    if scores.is_cuda:
        return scores.sort(dim=-1).values
    scores.numpy().sort(axis=-1)
    return scores
