"""Attention of a token and its drafts on a CPU: milliseconds of all 16 layers of the 213M shape, by number of rows.

    python -m loadtest.kernels.verify_rows

One thread; processor time, the least of many steps. Every layer reads keys of its own, as in a step.
"""

from __future__ import annotations

import argparse
import time

import torch

from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch, paged_attention

NUM_LAYERS, NUM_HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 16, 16, 4, 64, 16
ROWS = (1, 2, 4, 8, 12, 16)
CONTEXTS = (160, 1024)


def step_ms(rows: int, context: int, dtype: torch.dtype, repeats: int) -> float:
    """Return the least time of one step of one sequence."""
    num_blocks = -(-context // BLOCK_TOKENS)
    pool = uniform_pool(torch.randn(num_blocks, KV_HEADS, NUM_LAYERS, 2, BLOCK_TOKENS, DIM).to(dtype))
    q = torch.randn(rows, NUM_HEADS, DIM).to(dtype)
    tables = [torch.randperm(num_blocks).tolist()]
    times = []
    for _ in range(repeats):
        batch = PagedBatch(pool, NUM_HEADS, [0, rows], [context], tables, [True])
        start = time.process_time()
        for layer in range(NUM_LAYERS):
            paged_attention(q, layer, batch)
        times.append(time.process_time() - start)
    return min(times) * 1e3


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("rows " + " ".join(f"{rows:7}" for rows in ROWS))
    for dtype in (torch.bfloat16, torch.float32):
        for context in CONTEXTS:
            figures = [step_ms(rows, context, dtype, options.repeats) for rows in ROWS]
            print(" ".join(f"{each:7.2f}" for each in figures) + f" ms, context {context}, {dtype}")


if __name__ == "__main__":
    main()
