"""Samples tokens from logits on the device and copies them to the host while later steps run.

One row of logits is one sampled position; a chunk may sample at several positions. The tokens stay on the device for
the next step, which may be launched before the host knows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.device_copy import DeviceCopier, DeviceEvent
from weft.engine.step_scheduler import SampledToken
from weft.errors import InvalidRequest, ModelFailed, WeftError
from weft.request import PositionLogprobs, SamplingParams, TokenLogprob
from weft_kernels.sampling import SamplingRows, logprobs, max_logits, sample


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device, with the results that are being copied to the host.

    - `on_host`: per row the token, the largest logit as the model computed it, and the largest one that was sampled
      from. If any row asks for logprobs, three more tensors follow for these rows: logprob of the token, values, ids.
    - `spans`: rows [start, stop) of each chunk, in the order in which the chunks were launched.
    - `asked`: number of logprobs, by row. `failures`: why a row has no valid token, by row.
    """

    on_host: tuple[Tensor, ...]
    spans: Items[tuple[int, int]]
    done: DeviceEvent
    asked: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)

    def collect(self) -> list[tuple[SampledToken, ...]]:
        """Wait for the step and return each chunk's tokens, one for each of its sampled positions.

        Waits even if nothing was sampled: peers may read the KV that the step writes.
        """
        self.done.wait()
        if not self.on_host:
            return [()] * len(self.spans)
        tokens, tops, shaped_tops, *found = (each.tolist() for each in self.on_host)
        sampled = [
            SampledToken(token, failure=self._failure(row, tops[row], shaped_tops[row]))
            for row, token in enumerate(tokens)
        ]
        for at, (row, num_top) in enumerate(self.asked.items()):
            position = _position_logprobs(tokens[row], [each[at] for each in found], num_top)
            sampled[row] = replace(sampled[row], logprobs=position)
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
        is_greedy = all(each.temperature <= 0 for each in params)
        tokens = sample(shaped, None if is_greedy else self._sampling_rows(params, positions))
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

    def _sampling_rows(self, params: Items[SamplingParams], positions: Items[int]) -> SamplingRows:
        upload = self._copier.upload
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
