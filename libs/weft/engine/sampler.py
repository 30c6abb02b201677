"""From logits to tokens: sampled on the device, where the next step finds them, and copied to the host meanwhile.

Knows sequences and their parameters, not how the logits came about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copy import DeviceCopier, DeviceEvent
from weft.engine.logits_processor import LogitsProcessor
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import SampledToken, ScheduledChunk
from weft.errors import InvalidRequest, ModelFailed, WeftError
from weft.request import PositionLogprobs, SamplingParams, TokenLogprob
from weft_kernels.sampling import SamplingRows, logprobs, max_logits, sample


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """`on_host`: tokens, the largest logits of rows, as the model gave them and as they were sampled from, and then,
    where logprobs are `asked` for, three tensors of logprobs: of the chosen, values, ids.

    `order`: where in them the results stand, in the order of the chunks. By row: `asked`, how many logprobs, and
    `failures`, why there is no token.
    """

    on_host: tuple[Tensor, ...]
    order: Items[int]
    done: DeviceEvent
    asked: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def collect(self) -> list[SampledToken]:
        """Wait until the step is done; without any tokens too, as peers will read the KV that it wrote."""
        self.done.wait()
        if not self.on_host:
            return []
        tokens, tops, shaped_tops, *found = (each.tolist() for each in self.on_host)
        sampled = [
            SampledToken(token, failure=self._failure(row, tops[row], shaped_tops[row]))
            for row, token in enumerate(tokens)
        ]
        for at, (row, num_top) in enumerate(self.asked.items()):
            position = _position_logprobs(tokens[row], [each[at] for each in found], num_top)
            sampled[row] = replace(sampled[row], logprobs=position)
        return [sampled[row] for row in self.order]

    def _failure(self, row: int, top: float, shaped_top: float) -> WeftError | None:
        """Any token of such a row would be made up, and look like an answer."""
        if row in self.failures:
            return InvalidRequest(self.failures[row], "grammar")
        if not math.isfinite(top):
            return ModelFailed(f"non-finite logits ({top}): the weights are damaged, or their sums overflow the dtype")
        if not math.isfinite(shaped_top):
            return ModelFailed("non-finite logits: masks and biases leave no token")
        return None


class Sampler:
    """Remembers the last step's tokens: by the time the next one is launched, the host may not know them."""

    def __init__(self, link: DeviceCopier, config: EngineConfig) -> None:
        self.last = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=link.device)
        self._shaper = LogitsProcessor(config.vocab_size, config.eos_token_ids, link)
        self._rows: dict[Sequence, int] = {}
        self._link = link

    def last_row(self, sequence: Sequence) -> int:
        """Where in `last` the newest token of a sequence stands, which the last step sampled."""
        return self._rows[sequence]

    def launch(self, chunks: Items[ScheduledChunk], order: Items[int], logits: Tensor) -> LaunchedStep:
        """One token for each row of `logits`, which are those of `works`; `order`: of the results."""
        self._rows = {chunk.sequence: row for row, chunk in enumerate(chunks)}
        if not chunks:
            return LaunchedStep((), order, self._link.record_event())
        params = [chunk.sequence.spec.sampling for chunk in chunks]
        shaped, failures = self._shaper.apply([chunk.sequence for chunk in chunks], logits)
        is_greedy = all(each.temperature <= 0 for each in params)
        positions = [chunk.start + chunk.num_tokens for chunk in chunks]
        tokens = sample(shaped, None if is_greedy else self._sampling_rows(params, positions))
        self.last[: len(chunks)] = tokens
        asked = {row: each.num_logprobs for row, each in enumerate(params) if each.num_logprobs is not None}
        found: tuple[Tensor, ...] = ()
        if asked:
            rows = self._link.upload(np.array(list(asked)))
            found = logprobs(logits[rows], tokens[rows], max(asked.values()))
        raw = max_logits(logits)
        largest = (raw, raw if shaped is logits else max_logits(shaped))
        on_host = tuple(self._link.download(each) for each in (tokens, *largest, *found))
        return LaunchedStep(on_host, order, self._link.record_event(), asked, failures)

    def _sampling_rows(self, params: Items[SamplingParams], positions: list[int]) -> SamplingRows:
        upload = self._link.upload
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
