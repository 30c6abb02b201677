"""Sampling: chooses the next token of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.native import native
from weft_kernels.sampling.reference import SamplingRows as SamplingRows
from weft_kernels.sampling.reference import floors, race

# Version of the tokens that a seed gives for the same logits. Raise it with any change of the noise, the race or the
# filters: workers of two versions do not continue each other's sampled answers. Version 1 had one noise per position.
SAMPLING_VERSION = 2


def sample(logits: Tensor, rows: SamplingRows | None) -> Tensor:
    """Return one token per row, [R] int64: argmax for greedy rows, else the token that wins the race.

    logits: [R, V] float32. Tokens race that top-k, then top-p, then min-p keep of softmax(logits / temperature). The
    largest sum of logit / temperature and noise wins; the noise is a function of seed, position and token. A row's
    token depends only on its own logits and parameters. Without `rows` all are greedy.
    """
    return _sample(logits, rows, None)


def sample_drafts(logits: Tensor, rows: SamplingRows | None, token_ids: Tensor) -> Tensor:
    """Return one token of the target per row of a draft model's logits, [R] int64.

    token_ids: [V] int32, strictly rising: the target's token of each column. The draft of a position races with the
    noise that the target's sample gets there, so both choose the same token if their distributions are close.
    """
    return _sample(logits, rows, token_ids)


def _sample(logits: Tensor, rows: SamplingRows | None, token_ids: Tensor | None) -> Tensor:
    assert logits.ndim == 2
    if rows is None:
        return _named(logits.argmax(-1) if logits.is_cuda else argmax(logits), token_ids)
    if not logits.is_cuda:
        return sample_on_cpu(logits, rows, token_ids)
    from weft_kernels.sampling.kernel import sample_kernel

    return sample_kernel(logits, rows, token_ids)


def _named(places: Tensor, token_ids: Tensor | None) -> Tensor:
    return places if token_ids is None else token_ids[places].long()


def max_logits(logits: Tensor) -> Tensor:
    """Return the largest logit of each row, [R] float32; NaN if any is NaN. Uses numpy on a CPU, like `argmax`."""
    if not logits.is_cuda:
        return torch.from_numpy(logits.numpy().max(-1))
    return logits.amax(-1)


def compile_sampling(num_items: int, device: torch.device) -> None:
    """Sample once in every mode, so that a GPU compiles its kernels now and not during a step."""
    logits = torch.zeros(1, num_items, device=device)
    columns = {
        "temperature": torch.ones(1, device=device),
        "top_k": torch.ones(1, dtype=torch.int64, device=device),
        "top_p": torch.full((1,), 0.5, dtype=torch.float64, device=device),
        "min_p": torch.zeros(1, device=device),
        "seeds": torch.zeros(1, dtype=torch.int64, device=device),
        "positions": torch.zeros(1, dtype=torch.int64, device=device),
    }
    for has_top_k, has_top_p in ((False, False), (True, True)):
        sample(logits, SamplingRows(**columns, has_top_k=has_top_k, has_top_p=has_top_p))


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln p of `tokens` [R] under softmax(logits), and the best `num_top` values and IDs, [R, num_top]."""
    log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(num_top, log_p.shape[-1]), dim=-1)
    return log_p.gather(-1, tokens[:, None])[:, 0], top.values, top.indices


GROUP_ITEMS = 1 << 18


def sample_on_cpu(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None = None) -> Tensor:
    drawn, size = (rows.temperature > 0).nonzero()[:, 0], _group_rows(logits, rows)
    if len(drawn) == len(logits) <= size:
        return _draw(logits, rows, token_ids)
    tokens = _named(argmax(logits), token_ids)
    for some in torch.split(drawn, size):
        tokens[some] = _draw(logits[some], rows.select(some), token_ids)
    return tokens


def _group_rows(logits: Tensor, rows: SamplingRows) -> int:
    """Return how many rows are drawn at once, which bounds temporary memory; the native race needs none."""
    if native() is not None and not (rows.has_top_k or rows.has_top_p):
        return len(logits)
    return max(1, GROUP_ITEMS // logits.shape[1])


def _draw(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None) -> Tensor:
    library = native()
    if library is None:
        return race(logits, rows, token_ids)
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    lowest, tokens = floors(logits, rows), torch.empty(len(logits), dtype=torch.int64)
    library.weft_race(
        logits.data_ptr(),
        *logits.shape,
        logits.stride(0),
        rows.temperature.data_ptr(),
        lowest.data_ptr(),
        rows.seeds.data_ptr(),
        rows.positions.data_ptr(),
        None if token_ids is None else token_ids.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """Return the first argmax of each row, [R] int64. For 151,936 logits torch took 0.27 ms, numpy 0.01."""
    return torch.from_numpy(logits.numpy().argmax(-1))
