"""Decode steps on padded buffers that stay in place: the plain path is their oracle, and transformers is that of both.

On a CPU a graph is run again instead of replayed; everything around that is what a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver
from tests.weft.engine.test_tokens import prompts_of
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.config import EngineConfig
from weft.engine.graph_shapes import GraphShape, graph_sizes, num_scratch_blocks, static_bytes
from weft.engine.graphs import DecodeGraphs
from weft.engine.step_input import StepInput
from weft.kv.layer_groups import AttentionSpan
from weft.model.kv_layout import kv_groups
from weft_kernels.cuda_graphs import GraphRecorder

LENGTHS = [1, 7, 15, 16, 17, 40]
NUM_NEW = [20, 17, 14, 11, 8, 5]
Sizes = list[tuple[int, GraphShape]]


@pytest.fixture
def sizes_run(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Of each step that was replayed: its sequences, and the graph's shape."""
    seen: Sizes = []
    fill = DecodeGraphs._fill

    def watched(self: DecodeGraphs, step: StepInput, shape: GraphShape, places: Any) -> None:
        seen.append((len(step.starts) - 1, shape))
        for lens, buffer in zip(step.lens, self._tables, strict=True):
            assert max(lens) <= self._pool.block_tokens * buffer.tensor.shape[1]
        fill(self, step, shape, places)

    monkeypatch.setattr(DecodeGraphs, "_fill", watched)
    return seen


def test_sizes_are_dense_where_padding_costs_most() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert graph_sizes(256)[-4:] == (160, 192, 224, 256)
    assert graph_sizes(1000) == graph_sizes(256)


def test_tables_of_layers_that_see_a_chunk_are_no_wider_than_that_takes() -> None:
    """With ten million positions, one table of the two is as wide as all of them."""
    reaches = (AttentionSpan(), AttentionSpan(chunk=8192))
    config = EngineConfig(200_000, 64, 100, 10_485_760, 2048, max_num_seqs=256, decode_graphs=True, spans=reaches)
    assert config.context_tokens == 10_485_760
    whole = 256 * config.context_tokens // 64 * torch.int32.itemsize
    assert whole < static_bytes(config, 0) < 1.01 * whole


def test_every_row_has_a_scratch_slot() -> None:
    config = EngineConfig(8, 16, 100, 128, max_num_seqs=40, decode_graphs=True)
    assert num_scratch_blocks(config) == 3
    assert num_scratch_blocks(EngineConfig(8, 16, 100, 128, max_num_seqs=40)) == 0


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "llama4", "deepseek"])
def test_tokens_are_those_of_the_plain_path_and_of_transformers(
    name: str, family_of: Callable[[str], TinyFamily], sizes_run: Sizes
) -> None:
    """With batches that grow and shrink, pages that go back, preemption, and sequences that sample."""
    tiny = family_of(name)
    prompts = prompts_of(LENGTHS, 110)
    few: dict[str, Any] = {"num_blocks": 10 * len(kv_groups(tiny.config).spans), "max_num_seqs": 6}
    found = []
    for has_graphs in (False, True):
        with Driver(tiny, decode_graphs=has_graphs, **few) as driver:
            driver.pool().fill_(float("nan"))
            keys = [
                driver.submit(str(i), prompt, num, temperature=i % 2, logit_bias=((5, 0.5),) if i == 3 else ())
                for i, (prompt, num) in enumerate(zip(prompts, NUM_NEW, strict=True))
            ]
            found.append([driver.wait_end(key).tokens for key in keys])
            driver.assert_all_blocks_are_back()
        assert bool(sizes_run) == has_graphs
    assert found[0] == found[1]
    for at in (0, 2, 4):
        assert found[1][at] == tiny.greedy(prompts[at], NUM_NEW[at])
    assert len({shape for _, shape in sizes_run}) >= 3
    assert any(wanted < shape.num_seqs for wanted, shape in sizes_run), "nothing was ever padded"


def test_padding_writes_nothing_that_is_anybodys(grouped: Tiny, sizes_run: Sizes) -> None:
    """Three rows in a graph for four: behind their own tokens every byte of the pool is what it was."""
    pools = []
    for has_graphs in (False, True):
        with Driver(grouped, decode_graphs=has_graphs, num_blocks=24, max_num_seqs=4) as driver:
            pool = driver.pool().fill_(float("nan"))
            keys = [driver.submit(str(i), prompt, 12) for i, prompt in enumerate(prompts_of([5, 18, 33], 100))]
            assert all(len(driver.wait_end(key).tokens) == 12 for key in keys)
            driver.assert_all_blocks_are_back()
            pools.append(pool.clone())
    assert (3, (4, 1)) in sizes_run
    is_untouched = pools[0].isnan()
    assert is_untouched.any()
    assert torch.equal(is_untouched, pools[1].isnan())
    torch.testing.assert_close(pools[0].nan_to_num(), pools[1].nan_to_num(), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_a_graph_runs_as_before(
    grouped: Tiny, sizes_run: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.graph_shapes.MAX_SIZE", 2)
    prompts = prompts_of([9, 20, 31], 100)
    with Driver(grouped, decode_graphs=True, max_num_seqs=4) as driver:
        keys = [driver.submit(str(i), prompt, 8 + 4 * i) for i, prompt in enumerate(prompts)]
        found = [driver.wait_end(key).tokens for key in keys]
    assert found == [grouped.greedy(prompt, 8 + 4 * i) for i, prompt in enumerate(prompts)]
    assert {shape for _, shape in sizes_run} == {(1, 1), (2, 1)}, "three at a time and prompts have no graphs"


@pytest.mark.parametrize(("max_drafts", "num_rows"), [(0, 1), (1, 2), (2, 4), (15, 8)])
def test_graphs_are_captured_when_first_needed_and_the_largest_first(
    grouped: Tiny, monkeypatch: pytest.MonkeyPatch, max_drafts: int, num_rows: int
) -> None:
    recorded: list[GraphShape] = []
    record = DecodeGraphs._record

    def watched(self: DecodeGraphs, shape: GraphShape) -> None:
        recorded.append(shape)
        record(self, shape)

    monkeypatch.setattr(DecodeGraphs, "_record", watched)
    with Driver(grouped, decode_graphs=True, max_num_seqs=16, max_drafts=max_drafts) as driver:
        driver.generate([4, 5, 6], 1)
        assert recorded == []
        driver.generate([4, 5, 6], 4, "two")
        assert recorded == [(16, num_rows), (1, 1)]
        for key in [driver.submit(name, [7, 8], 4) for name in ("three", "four")]:
            driver.wait_end(key)
    assert recorded == [(16, num_rows), (1, 1), (2, 1)]


def test_where_a_capture_fails_steps_go_on_without(
    grouped: Tiny, sizes_run: Sizes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and not tried again for other sizes."""

    def refuse() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    monkeypatch.setattr("weft.engine.graphs.GraphRecorder", lambda _: GraphRecorder(torch.device("cuda")))
    with Driver(grouped, decode_graphs=True, max_num_seqs=4) as driver:
        keys = [driver.submit(str(i), prompt, 6 + 4 * i) for i, prompt in enumerate(prompts_of([9, 20, 31], 100))]
        found = [driver.wait_end(key).tokens for key in keys]
    assert found == [grouped.greedy(prompt, 6 + 4 * i) for i, prompt in enumerate(prompts_of([9, 20, 31], 100))]
    assert len({shape for _, shape in sizes_run}) > 1
    assert [each.message for each in caplog.records if "not permitted" in each.message] == [
        "cuda graph capture failed, launching kernel by kernel from now on error="
        "operation not permitted when stream is capturing"
    ]


def test_a_window_and_a_chunk_have_tables_of_their_own(family_of: Callable[[str], TinyFamily]) -> None:
    """The two families above that have several groups: else the test of tokens would say little."""
    assert len(kv_groups(family_of("llama4").config).spans) > 1
    assert kv_groups(family_of("mistral-window").config).spans[0] == AttentionSpan(window=8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "llama4", "deepseek"])
def test_replayed_graphs_give_the_tokens_of_transformers(
    name: str, family_of: Callable[[str], TinyFamily], sizes_run: Sizes
) -> None:
    tiny = family_of(name)
    prompts = prompts_of(LENGTHS, 110)
    with Driver(tiny, device="cuda", decode_graphs=True, num_blocks=256, max_num_seqs=8) as driver:
        for turn in ("captured", "replayed"):
            keys = [driver.submit(f"{turn}-{i}", prompt, NUM_NEW[i]) for i, prompt in enumerate(prompts)]
            found = [driver.wait_end(key).tokens for key in keys]
            assert found == [tiny.greedy(prompt, num) for prompt, num in zip(prompts, NUM_NEW, strict=True)]
    assert sizes_run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_after_a_failed_capture_the_device_goes_on_where_it_was() -> None:
    """Reading a value back is what a capture cannot take."""
    stream, counter = torch.cuda.current_stream(), torch.zeros((), device="cuda")
    recorder = GraphRecorder(counter.device)

    def count() -> None:
        counter.add_(1)
        counter.item()

    again = recorder.capture(count)
    assert torch.cuda.current_stream() == stream
    before = counter.item()
    again()
    assert counter.item() == before + 1
    assert recorder.capture(count) is count
    # what the allocator has cached comes back to those who find no memory otherwise
    for share in (0.6, 0.7):
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        torch.empty(int(share * free), dtype=torch.uint8, device="cuda")
