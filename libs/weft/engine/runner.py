"""The part with tensors: owns the pool's bytes, turns a step's works into one packed batch, runs the model, samples.

Knows neither which works are due nor what becomes of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Sampled, Work
from weft.engine.config import EngineConfig
from weft.engine.messages import PoolMemory
from weft.engine.shaping import Shaper
from weft.kv.groups import PageRun
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.step import Rows
from weft.request import PositionLogprobs, SamplingParams, TokenLogprob
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.sampling import SamplingRows, logprobs, sample

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """One model on one device with its block pool."""

    def __init__(self, model: Decoder, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self._model = model
        self._block_tokens = config.block_tokens
        self._paging = config.paging
        groups = kv_groups(model.config)
        if groups.reaches != config.reaches:
            raise ValueError(f"the model's layers reach {groups.reaches}, the engine is for {config.reaches}")
        self._device = device
        self._shaper = Shaper(config.vocab_size, config.eos_token_ids, device)
        size = block_bytes(model.config, dtype, config.block_tokens)
        # Transfer engines register whole pages. Zeros: masked values are still multiplied, and 0 times NaN is NaN.
        memory = torch.zeros(config.num_blocks * size + PAGE_BYTES, dtype=torch.uint8, device=device)
        offset = -memory.data_ptr() % PAGE_BYTES
        shape = (
            config.num_blocks,
            model.config.num_kv_heads,
            groups.size,
            model.config.kv_parts,
            config.block_tokens,
            -1,
        )
        self.pool = memory[offset : offset + config.num_blocks * size].view(DTYPES[dtype]).view(shape)
        self._memory = PoolMemory(self.pool.data_ptr(), size, config.num_blocks)

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies: page-aligned, one contiguous run."""
        return self._memory

    @torch.inference_mode()
    def execute(self, works: Items[Work]) -> list[Sampled]:
        """Compute the KV of every work's tokens; one token for each work that samples, in their order."""
        # Single tokens first, by length, as the attention groups neighbours; results go back in the order asked.
        order = sorted(range(len(works)), key=lambda i: (works[i].num_tokens > 1, -works[i].sequence.num_computed))
        ordered = [works[i] for i in order]
        self._clear_new_tails(ordered)
        batches = [self._batch(ordered, group) for group in range(len(self._paging.reaches))]
        logits = self._model.forward(self._rows(ordered), batches)
        sampled = dict(zip([i for i in order if works[i].samples], self._sample(ordered, logits), strict=True))
        if not sampled and self._device.type == "cuda":
            # reading tokens back waits for the device; without any, peers would be told of KV that is not there yet
            torch.cuda.current_stream(self._device).synchronize()
        return [sampled[i] for i in sorted(sampled)]

    def _rows(self, works: Items[Work]) -> Rows:
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[list[np.ndarray]] = []
        logit_rows: list[int] = []
        for work in works:
            sequence, start = work.sequence, work.sequence.num_computed
            token_ids += sequence.token_ids[start : start + work.num_tokens]
            at = np.arange(start, start + work.num_tokens)
            positions.append(at)
            slots.append([self._slots(run, at) for run in sequence.runs])
            if work.samples:
                logit_rows.append(len(token_ids) - 1)
        return Rows(
            torch.tensor(token_ids, device=self._device),
            torch.from_numpy(np.concatenate(positions)).to(self._device),
            torch.from_numpy(np.concatenate(slots, axis=1)).to(self._device),
            torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
        )

    def _slots(self, run: PageRun, at: np.ndarray) -> np.ndarray:
        """Where the KV of these consecutive positions goes."""
        index = at // self._block_tokens
        blocks = np.array(run.blocks[index[0] - run.first : index[-1] + 1 - run.first])
        slots: np.ndarray = blocks[index - index[0]] * self._block_tokens + at % self._block_tokens
        return slots

    def _batch(self, works: Items[Work], group: int) -> PagedBatch:
        """Contexts begin at the group's first page, or a little before: attention knows distances and chunks alone."""
        starts = [0, *np.cumsum([work.num_tokens for work in works]).tolist()]
        lens, tables = [], []
        for work in works:
            sequence, run = work.sequence, work.sequence.runs[group]
            num_left_out = self._paging.num_left_out(group, run.first)
            lens.append(sequence.num_computed + work.num_tokens - num_left_out * self._block_tokens)
            tables.append(run.blocks[:1] * (run.first - num_left_out) + run.blocks)
        return PagedBatch(self.pool, self._model.config.num_heads, starts, lens, tables)

    def _clear_new_tails(self, works: Items[Work]) -> None:
        """A block that this step begins and does not fill: its last owner's numbers must not be read under a mask."""
        for work in works:
            start = work.sequence.num_computed
            index, num_filled = divmod(start + work.num_tokens, self._block_tokens)
            if num_filled and index * self._block_tokens >= start:
                for run in work.sequence.runs:
                    self.pool[run.page(index)].zero_()

    def _sample(self, works: Items[Work], logits: Tensor) -> list[Sampled]:
        """One token for each row of `logits`, which are those of the works that sample."""
        sequences = [work.sequence for work in works if work.samples]
        if not sequences:
            return []
        params = [sequence.spec.sampling for sequence in sequences]
        shaped, failures = self._shaper.shape(sequences, logits)
        tokens = sample(shaped, _sampling_rows(params, [len(each.token_ids) for each in sequences], self._device))
        asked = [i for i, each in enumerate(params) if each.num_logprobs is not None]
        nums_top = [params[i].num_logprobs or 0 for i in asked]
        found = _position_logprobs(logits[asked], tokens[asked], nums_top) if asked else []
        by_row = dict(zip(asked, found, strict=True))
        return [Sampled(token, by_row.get(row), failures.get(row)) for row, token in enumerate(tokens.tolist())]


def _sampling_rows(params: Items[SamplingParams], positions: list[int], device: torch.device) -> SamplingRows:
    seeds = np.array([each.seed & 0xFFFF_FFFF_FFFF_FFFF for each in params], dtype=np.uint64).view(np.int64)
    return SamplingRows(
        temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([min(each.top_k, 2**31) for each in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([each.min_p for each in params], dtype=torch.float32, device=device),
        seeds=torch.from_numpy(seeds).to(device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        is_greedy=all(each.temperature <= 0 for each in params),
        has_top_k_or_p=any(each.top_k > 0 or each.top_p < 1 for each in params),
    )


def _position_logprobs(logits: Tensor, tokens: Tensor, nums_top: list[int]) -> list[PositionLogprobs]:
    chosen, values, ids = (each.tolist() for each in logprobs(logits, tokens, max(nums_top)))
    return [
        PositionLogprobs(
            TokenLogprob(token, chosen[row]),
            tuple(TokenLogprob(*pair) for pair in zip(ids[row][:num_top], values[row][:num_top], strict=True)),
        )
        for row, (token, num_top) in enumerate(zip(tokens.tolist(), nums_top, strict=True))
    ]
