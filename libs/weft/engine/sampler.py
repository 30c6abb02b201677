"""Changes logits, samples tokens from them on the device, and copies these to the host while later steps run.

One row of logits is one sampled position; a chunk may sample at several positions. The tokens stay on the device for
the next step, which may be launched before the host knows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.device_copier import DeviceCopier, DeviceEvent
from weft.engine.messages import Constraint
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import SampledToken
from weft.errors import InvalidRequest, ModelFailed, WeftError
from weft.request import PositionLogprobs, SamplingParams, TokenLogprob
from weft_kernels.logit_changes import LogitChanges, apply_changes
from weft_kernels.sampling import SamplingRows, logprobs, max_logits, sample

Places = list[tuple[int, int]]


class SampledPosition(NamedTuple):
    """A row of logits: the sequence, and the position at which the sampled token will stand.

    `drafts`: the drafts right before `position`, not accepted yet. The row before it has all but the last of them.
    If `sequence.needs_host_tokens`, the host must know all tokens before the drafts.
    """

    sequence: Sequence
    position: int
    drafts: tuple[int, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """True if the token is not chosen from the model's own logits alone."""
        sampling = self.sequence.spec.sampling
        if sampling.logit_bias or self.sequence.needs_host_tokens:
            return True
        return self.sequence.num_generated_before(self.position) < sampling.min_tokens


class LogitsProcessor:
    """Applies biases, penalties, bans of end tokens before `min_tokens` and grammar masks to the logits of one step.

    Positions of one sequence must come in ascending order.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], copier: DeviceCopier) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._upload = copier.upload

    def apply(self, rows: Items[SampledPosition], logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Return the logits to sample from, and the reason for each row with a failed grammar.

        `logits` is not changed. Rows with a failed grammar keep their logits.
        """
        if not any(row.changes_logits for row in rows):
            return logits, {}
        (masked, masks), failures = self._masks(rows)
        seen, penalties = self._seen(rows)
        bias, banned = self._bias(rows), self._banned(rows)
        return apply_changes(logits, LogitChanges(bias, seen, penalties, banned, masked, masks)), failures

    def _bias(self, rows: Items[SampledPosition]) -> tuple[Tensor, Tensor] | None:
        places: Places = []
        addends: list[float] = []
        for index, row in enumerate(rows):
            for token, bias in row.sequence.spec.sampling.logit_bias:
                places.append((index, token))
                addends.append(bias)
        if not places:
            return None
        return self._places(places), self._upload(np.array(addends, dtype=np.float32))

    def _seen(self, rows: Items[SampledPosition]) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        indices: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        counts: list[NDArray[np.float32]] = []
        for index, (sequence, position, drafts) in enumerate(rows):
            if sequence.spec.sampling.has_penalties:
                history = sequence.token_history()
                ids, times = history.count(sequence.token_ids, position - len(drafts), drafts)
                indices.append(np.full(len(ids), index))
                tokens.append(ids)
                counts.append(times)
        if not indices:
            return None, None
        places = np.stack([np.concatenate(indices), np.concatenate(tokens)])
        params = [row.sequence.spec.sampling for row in rows]
        penalties = [[each.repetition_penalty, each.frequency_penalty, each.presence_penalty] for each in params]
        seen = (self._upload(places), self._upload(np.concatenate(counts)))
        return seen, self._upload(np.array(penalties, dtype=np.float32))

    def _banned(self, rows: Items[SampledPosition]) -> Tensor | None:
        places = [
            (index, token)
            for index, row in enumerate(rows)
            if row.sequence.spec.constraint is None
            for token in self._early_ends(row)
        ]
        return self._places(places) if places else None

    def _early_ends(self, row: SampledPosition) -> set[int]:
        """Return the tokens that would end the sequence before `min_tokens`."""
        sequence, sampling = row.sequence, row.sequence.spec.sampling
        if sequence.num_generated_before(row.position) >= sampling.min_tokens:
            return set()
        return {*(() if sequence.ignores_eos else self._eos_token_ids), *sampling.stop_token_ids}

    def _masks(self, rows: Items[SampledPosition]) -> tuple[tuple[Tensor | None, Tensor | None], dict[int, str]]:
        failures: dict[int, str] = {}
        indices: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for index, row in enumerate(rows):
            if row.sequence.spec.constraint is None:
                continue
            constraint = self._constraint(row)
            mask, failure = self._mask(constraint, self._early_ends(row))
            if failure is None:
                indices.append(index)
                masks.append(mask)
            else:
                failures[index] = failure
            is_last = index + 1 == len(rows) or rows[index + 1].sequence is not row.sequence
            if is_last and row.drafts:
                constraint.rollback(len(row.drafts))
        if not indices:
            return (None, None), failures
        return (self._upload(np.array(indices)), self._upload(np.stack(masks))), failures

    def _constraint(self, row: SampledPosition) -> Constraint:
        """Return the constraint after it has accepted all tokens before the row, its drafts included."""
        history, token_ids = row.sequence.token_history(), row.sequence.token_ids
        constraint = history.advance(token_ids, row.position - len(row.drafts))
        if row.drafts:
            constraint.accept(row.drafts[-1:])  # the row before has left it after the earlier ones
        return constraint

    def _mask(self, constraint: Constraint, ends: set[int]) -> tuple[NDArray[np.int32], str | None]:
        """Return the grammar's mask without `ends`, and the grammar's failure if it has one.

        If the grammar allows only end tokens, they stay allowed: a complete answer may end before `min_tokens`.
        """
        words = np.zeros(self._num_words, dtype=np.int32)
        if constraint.failure is None:
            constraint.fill(words)
        others = words.copy()
        for token in ends:
            others.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        return (others if others.any() else words), constraint.failure

    def _places(self, places: Places) -> Tensor:
        return self._upload(np.array(places).T)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device, with the results that are being copied to the host.

    - `on_host`: per row the token, the largest logit as the model computed it, and the largest one that was sampled
      from. If any row asks for logprobs, three more tensors follow for these rows: logprob of the token, values, ids.
    - `spans`: rows [start, stop) of each chunk, in the order in which the chunks were launched.
    - `asked`: number of logprobs, by row. `failures`: why a row has no valid token, by row.
    - `work_seconds`: see `weft.engine.loop.StepHandle`.
    """

    on_host: tuple[Tensor, ...]
    spans: Items[tuple[int, int]]
    done: DeviceEvent
    asked: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    work_seconds: float | None = None

    def collect(self) -> list[tuple[SampledToken, ...]]:
        """Wait for the step and return each chunk's tokens, one for each of its sampled positions.

        Waits even if nothing was sampled: peers may read the KV that the step writes.
        """
        self.done.wait()
        if not self.on_host:
            return [()] * len(self.spans)
        tokens, tops, shaped_tops, *found = (each.tolist() for each in self.on_host)
        sampled = [SampledToken(token) for token in tokens]
        for row, each in enumerate(zip(tops, shaped_tops, strict=True)):
            if (failure := self._failure(row, *each)) is not None:
                sampled[row] = SampledToken(tokens[row], failure=failure)
        for at, (row, num_top) in enumerate(self.asked.items()):
            position = _position_logprobs(tokens[row], [each[at] for each in found], num_top)
            sampled[row] = sampled[row]._replace(logprobs=position)
        return [tuple(sampled[start:stop]) for start, stop in self.spans]

    def _failure(self, row: int, top: float, shaped_top: float) -> WeftError | None:
        """Return why the row has no valid token. Without this check, a made-up token would look like an answer."""
        if row in self.failures:
            return InvalidRequest(self.failures[row], "grammar")
        if not math.isfinite(top):
            return ModelFailed(f"non-finite logits ({top}): the weights are damaged, or their sums overflow the dtype")
        if not math.isfinite(shaped_top):
            return ModelFailed("non-finite logits: masks and biases leave no token")
        return None


class Sampler:
    """`last` [R] int64 holds the tokens of the previous step, one for each of its rows of logits."""

    def __init__(self, copier: DeviceCopier) -> None:
        self.last = torch.zeros(0, dtype=torch.int64, device=copier.device)
        self.rows_of = SamplingRowsMaker(copier)
        self._copier = copier

    def launch(
        self,
        logits: Tensor,
        shaped: Tensor,
        params: Items[SamplingParams],
        positions: Items[int],
        spans: Items[tuple[int, int]],
        failures: Mapping[int, str],
    ) -> LaunchedStep:
        """Sample one token for each row.

        - `logits`: as the model computed them; logprobs are read from these. `shaped`: the ones to sample from.
        - `params`, `positions`: of each row; `positions` are where the sampled tokens will stand.
        - `spans`, `failures`: see `LaunchedStep`.
        """
        if not params:
            self.last = self.last[:0]
            return LaunchedStep((), spans, self._copier.record_event())
        tokens = sample(shaped, self.rows_of(params, positions))
        self.last = tokens
        asked = {row: each.num_logprobs for row, each in enumerate(params) if each.num_logprobs is not None}
        found: tuple[Tensor, ...] = ()
        if asked:
            rows = self._copier.upload(np.array(list(asked)))
            found = logprobs(logits[rows], tokens[rows], max(asked.values()))
        raw = max_logits(logits)
        largest = (raw, raw if shaped is logits else max_logits(shaped))
        on_host = tuple(self._copier.download(each) for each in (tokens, *largest, *found))
        return LaunchedStep(on_host, spans, self._copier.record_event(), asked, failures)


class SamplingRowsMaker:
    """Makes the sampler's columns on the device from the parameters of each row."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._upload = copier.upload

    def __call__(self, params: Items[SamplingParams], positions: Items[int]) -> SamplingRows | None:
        """Return None if all rows are greedy. `positions`: where the sampled tokens will stand."""
        if all(each.temperature <= 0 for each in params):
            return None
        upload = self._upload
        seeds = np.array([each.seed & 0xFFFF_FFFF_FFFF_FFFF for each in params], dtype=np.uint64).view(np.int64)
        return SamplingRows(
            temperature=upload(np.array([each.temperature for each in params], dtype=np.float32)),
            top_k=upload(np.array([min(each.top_k, 2**31) for each in params])),
            top_p=upload(np.array([each.top_p for each in params], dtype=np.float64)),
            min_p=upload(np.array([each.min_p for each in params], dtype=np.float32)),
            seeds=upload(seeds),
            positions=upload(np.array(positions)),
            has_top_k=any(each.top_k > 0 for each in params),
            has_top_p=any(each.top_p < 1 for each in params),
        )


def _position_logprobs(token: int, found: Items[Any], num_top: int) -> PositionLogprobs:
    chosen, values, ids = found
    top = zip(ids[:num_top], values[:num_top], strict=True)
    return PositionLogprobs(TokenLogprob(token, chosen), tuple(TokenLogprob(*pair) for pair in top))
