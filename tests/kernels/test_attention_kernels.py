"""The attention kernels against a definition: one row and one head at a time over the keys that it sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, DTYPES, close

pytest.importorskip("triton")

from weft_kernels.paged_attention.decode import paged_attention_decode
from weft_kernels.paged_attention.device_batch import AttentionShape, PagedTensors, plan_launches
from weft_kernels.paged_attention.prefill import paged_attention_prefill

NUM_LAYERS, NUM_BLOCKS, LAYER = 3, 48, 1

# (new rows, context with them) of each sequence
DECODES = {
    "one token": [(1, 1)],
    "several lengths": [(1, 70), (1, 3), (1, 16), (1, 17)],
    "verification": [(4, 70), (8, 8), (1, 33), (3, 65)],
}
PREFILLS = {
    "one token": [(1, 1)],
    "a whole prompt": [(37, 37)],
    "chunks after contexts": [(5, 90), (66, 67), (1, 40)],
}


@dataclass
class Case:
    """A pool with random numbers where a sequence wrote, and NaN everywhere else."""

    q: Tensor
    keys: Tensor
    values: Tensor
    batch: PagedTensors

    def expected(self, shape: AttentionShape, sinks: Tensor | None = None) -> Tensor:
        out = torch.zeros(*self.q.shape[:2], self.values.shape[3], device=DEVICE)
        group = self.q.shape[1] // self.keys.shape[1]
        for index, (start, end) in enumerate(pairwise(self.batch.query_starts.tolist())):
            context = int(self.batch.context_lens[index])
            table = self.batch.block_tables[index].long()
            keys, values = (each[table].transpose(1, 2).flatten(0, 1).float() for each in (self.keys, self.values))
            for row in range(start, end):
                position = context - (end - row)
                first = max(0, position - shape.window + 1) if shape.window else 0
                first = max(first, position // shape.chunk * shape.chunk) if shape.chunk else first
                first = first if self.batch.first is None else max(first, int(self.batch.first[index]))
                for head in range(self.q.shape[1]):
                    seen = keys[first : position + 1, head // group]
                    scores = seen @ self.q[row, head].float() * shape.scale
                    if sinks is not None:  # one more score, whose value is zero
                        scores = torch.cat((scores, sinks[head : head + 1]))
                    weights = scores.softmax(0)[: len(seen)]
                    out[row, head] = weights @ values[first : position + 1, head // group]
        return out.to(self.q.dtype)


def make_case(
    spans: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    block_tokens: int = 16,
) -> Case:
    generator = torch.Generator().manual_seed(len(spans) + dim)
    num_heads, kv_heads = heads
    pool = torch.full((NUM_BLOCKS, kv_heads, NUM_LAYERS, 2, block_tokens, dim), float("nan"))
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = []
    for _, context in spans:
        table = [free.pop() for _ in range(-(-context // block_tokens))]
        for token in range(context):
            place = pool[table[token // block_tokens], :, :, :, token % block_tokens]
            place.copy_(torch.randn(place.shape, generator=generator))
        tables.append(table)
    starts = [sum(rows for rows, _ in spans[:i]) for i in range(len(spans) + 1)]
    q = torch.randn(starts[-1], num_heads, dim, generator=generator).to(dtype).to(DEVICE)
    pool = pool.to(dtype).to(DEVICE)
    width = max(len(table) for table in tables) + 1
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=DEVICE)
    batch = PagedTensors(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([context for _, context in spans], dtype=torch.int32, device=DEVICE),
        padded,
        max(rows for rows, _ in spans),
    )
    return Case(q, pool[:, :, LAYER, 0], pool[:, :, LAYER, 1], batch)


def hide(case: Case, first: list[int]) -> None:
    """Hide the first slots of each sequence, and make them NaN."""
    case.batch = replace(case.batch, first=torch.tensor(first, dtype=torch.int32, device=DEVICE))
    for table, bound in zip(case.batch.block_tables.tolist(), first, strict=True):
        for slot in range(bound):
            for each in (case.keys, case.values):
                each[table[slot // each.shape[2]], :, slot % each.shape[2]] = float("nan")


def decode(case: Case, shape: AttentionShape, sinks: Tensor | None = None) -> Tensor:
    out = case.q.new_full((*case.q.shape[:2], case.values.shape[3]), 7.0)
    paged_attention_decode(case.q, case.keys, case.values, case.batch, shape, out, sinks)
    return out


def prefill(case: Case, shape: AttentionShape, sinks: Tensor | None = None) -> Tensor:
    out = case.q.new_full((*case.q.shape[:2], case.values.shape[3]), 7.0)
    paged_attention_prefill(case.q, case.keys, case.values, case.batch, shape, out, sinks)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("spans", DECODES.values(), ids=DECODES)
def test_decode_is_the_definition(spans: list[tuple[int, int]], num_splits: int, dtype: torch.dtype) -> None:
    case, shape = make_case(spans, dtype), AttentionShape(0.25, num_splits=num_splits)
    close(decode(case, shape), case.expected(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", PREFILLS.values(), ids=PREFILLS)
def test_prefill_is_the_definition(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case, shape = make_case(spans, dtype), AttentionShape(0.25)
    close(prefill(case, shape), case.expected(shape))


@pytest.mark.parametrize(
    ("heads", "dim", "block_tokens"), [((3, 1), 10, 4), ((10, 2), 24, 16), ((2, 2), 96, 8), ((5, 1), 32, 64)]
)
def test_odd_heads_dims_and_blocks(heads: tuple[int, int], dim: int, block_tokens: int) -> None:
    case = make_case([(2, 45), (3, 12)], torch.float32, heads, dim, block_tokens)
    shape = AttentionShape(dim**-0.5, num_splits=2)
    expected = case.expected(shape)
    close(decode(case, shape), expected)
    close(prefill(case, shape), expected)


@pytest.mark.parametrize(
    "shape", [AttentionShape(0.25, window=8), AttentionShape(0.25, chunk=8), AttentionShape(0.25, window=1)]
)
def test_windows_and_chunks_at_all_their_edges(shape: AttentionShape) -> None:
    spans = [(4, 7), (4, 8), (4, 9), (4, 10), (8, 16), (1, 1), (1, 130)]
    case = make_case(spans)
    expected = case.expected(shape)
    close(decode(case, shape), expected)
    close(prefill(case, shape), expected)


@pytest.mark.parametrize(("chunk", "window", "num_splits"), [(0, 0, 4), (48, 8, 1)])
@pytest.mark.parametrize("first", [[0] * 5, [1, 3, 40, 16, 1], [66, 12, 60, 64, 128], [63, 0, 0, 65, 129]])
def test_slots_below_first_are_not_read(first: list[int], chunk: int, window: int, num_splits: int) -> None:
    case = make_case([(4, 70), (8, 20), (1, 61), (3, 68), (1, 130)])
    hide(case, first)
    shape = AttentionShape(0.25, window, chunk, num_splits)
    expected = case.expected(shape)
    close(decode(case, shape), expected)
    close(prefill(case, shape), expected)


@pytest.mark.parametrize(
    "shape", [AttentionShape(0.25), AttentionShape(0.25, window=40), AttentionShape(0.25, chunk=48)]
)
@pytest.mark.parametrize("first", [[1, 0], [50, 30], [37, 7]])
def test_prefill_reads_no_slots_below_first(first: list[int], shape: AttentionShape) -> None:
    case = make_case([(150, 200), (40, 70)])
    hide(case, first)
    close(prefill(case, shape), case.expected(shape))


def test_latent_rows_read_no_vectors_below_first() -> None:
    case, shape = make_case([(2, 40), (1, 67)], heads=(24, 1), dim=80), AttentionShape(0.1, num_splits=2)
    case.values = case.keys[..., :64]
    hide(case, [38, 5])
    close(decode(case, shape), case.expected(shape))
    close(prefill(case, shape), case.expected(shape))


@pytest.mark.parametrize(
    ("num_splits", "window", "dtype"),
    [
        (1, 0, torch.float32),
        (8, 8, torch.float32),
        (1, 8, torch.float16),
        (8, 0, torch.float16),
        pytest.param(1, 0, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(8, 8, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_sinks_join_the_denominator_once(num_splits: int, window: int, dtype: torch.dtype) -> None:
    case = make_case([(3, 130), (1, 1), (8, 40)], dtype, heads=(6, 2))
    shape = AttentionShape(0.25, window=window, num_splits=num_splits)
    sinks = torch.tensor([-1e4, -2.0, 0.0, 1.0, 4.0, 1e4], device=DEVICE)
    expected = case.expected(shape, sinks)
    close(decode(case, shape, sinks), expected)
    close(prefill(case, shape, sinks), expected)
    case.batch.context_lens[1] = 0  # as a graph's places that no sequence takes
    expected[3] = 0
    close(decode(case, shape, sinks), expected)


@pytest.mark.parametrize(
    "shape", [AttentionShape(0.25, window=40), AttentionShape(0.25, chunk=48), AttentionShape(0.25, chunk=48, window=5)]
)
def test_prefill_over_many_windows(shape: AttentionShape) -> None:
    case = make_case([(150, 200)])
    close(prefill(case, shape), case.expected(shape))


def test_blocks_that_have_left_the_window_may_be_anyones() -> None:
    case, shape = make_case([(2, 100)]), AttentionShape(0.25, window=20, num_splits=2)
    expected = case.expected(shape)
    owned = set(case.batch.block_tables[0].tolist())
    case.batch.block_tables[0, :4] = next(block for block in range(NUM_BLOCKS) if block not in owned)  # all NaN
    close(decode(case, shape), expected)
    close(prefill(case, shape), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_reads_values_from_the_front_of_its_keys(dtype: torch.dtype) -> None:
    case, shape = make_case([(2, 40), (1, 67)], dtype, heads=(24, 1), dim=80), AttentionShape(0.1, num_splits=2)
    case.values = case.keys[..., :64]
    close(decode(case, shape), case.expected(shape))
    close(prefill(case, shape), case.expected(shape))


def test_places_of_a_graph_that_no_sequence_takes_give_zeros() -> None:
    case = make_case([(1, 20), (1, 5), (1, 9)])
    shape = AttentionShape(0.25, num_splits=2)
    expected = case.expected(shape)
    case.batch.context_lens[1] = 0
    expected[1] = 0
    close(decode(case, shape), expected)
    close(prefill(case, shape), expected)
    for first in (1, 70):
        case.batch = replace(case.batch, first=torch.tensor([0, first, 0], dtype=torch.int32, device=DEVICE))
        close(decode(case, shape), expected)
        close(prefill(case, shape), expected)


@pytest.mark.parametrize("first", [[0, 0, 0], [9, 3, 1]])
def test_rows_of_other_sequences_are_left_alone(first: list[int]) -> None:
    case, shape = make_case([(2, 20), (1, 5), (3, 9)]), AttentionShape(0.25, num_splits=2)
    hide(case, first)
    expected = case.expected(shape)
    case.batch = case.batch.slice(1, 2, 1)
    for run in (decode, prefill):
        out = run(case, shape)
        close(out[2], expected[2])
        assert bool((out[:2] == 7).all())
        assert bool((out[3:] == 7).all())


def test_parts_are_kept_of_the_sequences_that_are_decoded_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    case, shape = make_case([(2, 40), (30, 70)]), AttentionShape(0.25, num_splits=32)
    expected, made, empty = case.expected(shape), list[tuple[int, ...]](), torch.empty

    def noted(*sizes: int, **kinds: Any) -> Tensor:
        made.append(sizes)
        return empty(*sizes, **kinds)

    monkeypatch.setattr(torch, "empty", noted)
    case.batch = case.batch.slice(0, 1, 2)
    out = decode(case, shape)
    close(out[:2], expected[:2])
    assert [sizes[0] for sizes in made if sizes[2:] == (32,)] == [2]


def test_launches_split_at_the_first_long_sequence() -> None:
    launches = plan_launches([0, 1, 3, 20, 21], [9, 8, 17, 3], [[3], [1], [5, 6], [0]], torch.device(DEVICE))
    assert launches.decode is not None
    assert launches.prefill is not None
    assert (len(launches.decode.context_lens), launches.decode.max_rows) == (2, 2)
    assert (len(launches.prefill.context_lens), launches.prefill.max_rows) == (2, 17)
    assert launches.prefill.query_starts.tolist() == [3, 20, 21]
    assert launches.prefill.block_tables[:, :2].tolist() == [[5, 6], [0, 0]]
    assert launches.prefill.block_tables.shape[1] % 16 == 0
    assert launches.decode.first is launches.prefill.first is None
    assert plan_launches([0, 1], [9], [[3]], torch.device(DEVICE)).prefill is None
    assert plan_launches([0, 9], [9], [[3]], torch.device(DEVICE)).decode is None


def test_launches_keep_first_of_their_sequences() -> None:
    tables, first = [[3], [1], [5, 6], [0]], [4, 0, 1, 2]
    launches = plan_launches([0, 1, 3, 20, 21], [9, 8, 20, 3], tables, torch.device(DEVICE), first)
    assert launches.decode is not None
    assert launches.prefill is not None
    assert launches.decode.first is not None
    assert launches.prefill.first is not None
    assert launches.decode.first.tolist() == [4, 0]
    assert launches.prefill.first.tolist() == [1, 2]
    assert launches.decode.context_lens.tolist() == [9, 8]
    assert launches.prefill.block_tables[:, :2].tolist() == [[5, 6], [0, 0]]
