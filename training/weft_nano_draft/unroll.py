"""The training pass of a draft head: drafts from every answer token of a batch at once ("training-time test").

Row k pairs the target's features at position k with token k + 1 and predicts token k + 2. Draft step j recycles the
row's own state, takes token k + 1 + j and predicts token k + 2 + j. Its attention sees what it sees while serving: the
keys of positions up to k, which come from true features, and the keys of the row's own earlier draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from training.weft_nano_draft.head import DraftHead


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What the target computes of a batch: [batch, tokens, ...]. `logits` are only those of answer tokens.

    `logits_at[b, k]` is the row of `logits` for position k of dialogue b.
    """

    features: tuple[Tensor, ...]
    logits: Tensor
    logits_at: Tensor


class DraftStep(NamedTuple):
    """Logits of one draft step, and the row, dialogue and position of each."""

    logits: Tensor
    dialogue: Tensor
    position: Tensor


class _Chain(NamedTuple):
    """A key and a value of one earlier draft step for each row."""

    key: Tensor
    value: Tensor


def draftable(is_answer: Tensor, num_steps: int) -> Tensor:
    """Return [steps, batch, tokens]: True where tokens k + 1 to k + 2 + j all belong to one answer."""
    shifted = [functional.pad(is_answer[:, i:], (0, i)) for i in range(1, num_steps + 2)]
    return torch.stack(shifted).cummin(0).values[1:]


def unroll(
    head: DraftHead, embedding: Tensor, token_ids: Tensor, features: tuple[Tensor, ...], valid: Tensor
) -> list[DraftStep]:
    """Return one result for each step of `valid`, which `draftable` made."""
    dialogue, position = valid[0].nonzero(as_tuple=True)
    batch, length = token_ids.shape
    fused = head.fuse(features)
    following = functional.embedding(token_ids.roll(-1, 1), embedding)
    entered = head.enter(fused, following)
    everywhere = torch.arange(length).repeat(batch)
    key, value = head.key_value(entered.flatten(0, 1), everywhere)
    keys, values = (each.view(batch, length, *each.shape[1:]) for each in (key, value))
    state, entered = fused[dialogue, position], entered[dialogue, position]
    chain: list[_Chain] = []
    steps: list[DraftStep] = []
    for step, mask in enumerate(valid):
        if step:
            kept = mask[dialogue, position]
            dialogue, position, state = dialogue[kept], position[kept], state[kept]
            chain = [_Chain(each.key[kept], each.value[kept]) for each in chain]
            token = token_ids[dialogue, position + 1 + step]
            entered = head.enter(state, functional.embedding(token, embedding))
            chain.append(_Chain(*head.key_value(entered, position + step)))
        query = head.query(entered, position + step)
        attended = _attend(query, keys, values, chain, dialogue, position)
        state = head.leave(state, attended)
        steps.append(DraftStep(functional.linear(state, embedding), dialogue, position))
    return steps


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, chain: list[_Chain], dialogue: Tensor, position: Tensor
) -> Tensor:
    """Return [rows, heads * head_dim]; the rows of a dialogue are consecutive."""
    counts = dialogue.bincount(minlength=len(keys)).tolist()
    outputs = []
    for index, (rows, at) in enumerate(zip(torch.split(query, counts), torch.split(position, counts), strict=True)):
        if not len(rows):
            continue
        start = sum(counts[:index])
        own = [_Chain(each.key[start : start + len(rows)], each.value[start : start + len(rows)]) for each in chain]
        end = int(at[-1]) + 1
        outputs.append(_attend_one(rows, keys[index, :end], values[index, :end], own, at))
    return torch.cat(outputs) if outputs else query.flatten(1)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, chain: list[_Chain], position: Tensor) -> Tensor:
    num_rows, num_heads, size = query.shape
    kv_heads = keys.shape[1]
    grouped = (query * size**-0.5).view(num_rows, kv_heads, -1, size)
    flat = grouped.transpose(0, 1).reshape(kv_heads, -1, size)
    scores = torch.bmm(flat, keys.permute(1, 2, 0)).view(kv_heads, num_rows, -1, len(keys))
    hidden = torch.arange(len(keys)) > position[:, None]
    scores = scores.masked_fill(hidden[None, :, None], float("-inf"))
    diagonal = [torch.einsum("nkgd,nkd->kng", grouped, each.key)[..., None] for each in chain]
    with torch.autocast("cpu", enabled=False):
        shares = torch.softmax(torch.cat((scores, *(each.to(scores.dtype) for each in diagonal)), -1), -1)
    causal = shares[..., : len(keys)].reshape(kv_heads, -1, len(keys))
    result = torch.bmm(causal, values.transpose(0, 1)).view(kv_heads, num_rows, -1, size)
    for index, each in enumerate(chain):
        result = result + shares[..., len(keys) + index, None] * each.value.transpose(0, 1)[:, :, None]
    return result.transpose(0, 1).reshape(num_rows, num_heads * size)


def draft_losses(steps: list[DraftStep], target: TargetOutput) -> list[Tensor]:
    """Return the mean cross entropy of each step against the target's distribution at the predicted position."""
    wanted = torch.softmax(target.logits.float(), -1)
    losses = []
    for number, step in enumerate(steps):
        rows = target.logits_at[step.dialogue, step.position + 1 + number]
        losses.append(functional.cross_entropy(step.logits.float(), wanted[rows]))
    return losses
