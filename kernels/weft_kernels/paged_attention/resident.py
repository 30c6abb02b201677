"""A packed batch that stays where it lies on the device, while its lengths and tables change from step to step."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.paged_attention.batch import PagedBatch
from weft_kernels.paged_attention.tensors import Launches, PagedTensors


def resident_batch(pool: Tensor, num_heads: int, tensors: PagedTensors) -> PagedBatch:
    """Sequences of one row each. The kernels read `tensors` when they run, at every replay of a captured graph too.

    On a CPU the batch is what lies in `tensors` now; on a GPU the host knows neither its lengths nor its tables.
    """
    assert tensors.max_rows == 1
    starts = range(len(tensors.context_lens) + 1)
    batch = PagedBatch(pool, num_heads, starts, (), ())
    if not pool.is_cuda:
        lens = tensors.context_lens.tolist()
        num_blocks = [-(-each // pool.shape[4]) for each in lens]
        rows = zip(tensors.block_tables.tolist(), num_blocks, strict=True)
        batch = PagedBatch(pool, num_heads, starts, lens, [blocks[:count] for blocks, count in rows])
    vars(batch)["launches"] = Launches(tensors, None)
    return batch
