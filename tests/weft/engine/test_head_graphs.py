"""Passes of a draft model in graphs give the bits of the same passes without graphs.

On a CPU a graph is run again instead of replayed; everything around that is what a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from copy import copy
from random import Random
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver
from tests.weft.engine.poison import Poison
from tests.weft.engine.test_speculation import CASES, SIZES, submit
from tests.weft.engine.tiny_heads import MixedSpeculator, SlowTwin, assert_drafts_are_those_of, with_head
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.drafting.drafter import DraftRequest, DraftToken, Proposal
from weft.engine.graph_shapes import GraphShape
from weft.engine.head_drafter import HeadDrafter, _PassByPass
from weft.engine.head_graphs import Choice, GraphRun, HeadGraphs
from weft.engine.head_planner import HeadRows
from weft.engine.sequence import Sequence
from weft.model.kv_layout import kv_groups

GRAPHS: dict[str, Any] = {**SIZES, "decode_graphs": True, "max_drafts": 7}
Chosen = tuple[list[int], list[float]]
GoesOn = Callable[[Sequence, Items[DraftToken]], bool]


class Comparison:
    """Drafts first without graphs, then again from the same state with graphs.

    - `passes`: tokens and probabilities of the last run. `num_runs`: runs with graphs.
    - `choices`, `fill_rows`: of the graphs that were replayed.
    - `is_varied`: sequences stop at random drafts; then only the drafts are compared, because in graphs they run on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_varied = False
        self.passes: list[Chosen] = []
        self.choices: set[Choice] = set()
        self.fill_rows: set[int] = set()
        self.num_runs = 0
        self._draft = HeadDrafter.draft
        for run in (GraphRun, _PassByPass):
            monkeypatch.setattr(run, "choose", self._noted(run.choose))
        monkeypatch.setattr(HeadDrafter, "draft", lambda *args: self.draft(*args))
        fill_rows, graph_choose = HeadGraphs._fill_rows, HeadGraphs.choose

        def fill(graphs: HeadGraphs, rows: HeadRows, shape: GraphShape) -> None:
            self.fill_rows.add(shape.num_rows)
            fill_rows(graphs, rows, shape)

        def choose(graphs: HeadGraphs, shape: GraphShape, choice: Choice) -> Chosen:
            self.choices.add(choice)
            return graph_choose(graphs, shape, choice)

        monkeypatch.setattr(HeadGraphs, "_fill_rows", fill)
        monkeypatch.setattr(HeadGraphs, "choose", choose)

    def draft(self, drafter: HeadDrafter, requests: Items[DraftRequest], goes_on: GoesOn) -> list[Proposal]:
        graphs = drafter._graphs
        if graphs is None or not graphs._replays:
            return self._draft(drafter, requests, goes_on)
        planner, pool = drafter._planner, drafter._executor.pool.memory
        num_blocks = graphs._scratch_slot // graphs._block_tokens
        before, seats, zeroed = pool[:num_blocks].clone(), planner._seats, set(planner.zeroed)
        planner._seats = {sequence: copy(seat) for sequence, seat in seats.items()}
        drafter._graphs = None
        self.passes.clear()
        expected = self._draft(drafter, requests, self._asked(goes_on))
        passes = list(self.passes)
        self.passes.clear()
        after = pool[:num_blocks].clone()
        planner._seats, planner.zeroed, drafter._graphs = seats, zeroed, graphs
        pool[:num_blocks] = before
        found = self._draft(drafter, requests, self._asked(goes_on))
        assert found == expected
        assert self.passes == passes
        if not self.is_varied:
            assert torch.equal(pool[:num_blocks].view(torch.int32), after.view(torch.int32))
        self.num_runs += bool(passes)
        return found

    def _asked(self, goes_on: GoesOn) -> GoesOn:
        if not self.is_varied:
            return goes_on
        chance = Random(self.num_runs)
        return lambda sequence, drafts: chance.random() < 0.7

    def _noted(self, choose: Callable[[Any], Chosen]) -> Callable[[Any], Chosen]:
        def noted(run: Any) -> Chosen:
            self.passes.append(choose(run))
            return self.passes[-1]

        return noted


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    return Comparison(monkeypatch)


@pytest.mark.parametrize("is_varied", [False, True], ids=["up to the limits", "stopped at random"])
def test_head_graphs_draft_the_same_with_all_sampling(grouped: Tiny, comparison: Comparison, is_varied: bool) -> None:
    tiny, make_head = with_head(grouped)
    comparison.is_varied = is_varied
    speculator = MixedSpeculator({}, max_drafts=7, share_head=0.6)
    sizes = {**GRAPHS, "block_tokens": 16, "max_num_seqs": 9}  # rows wait for the end of a block: up to 15
    with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
        keys = [submit(driver, name) for name in CASES]
        for key in keys:
            driver.wait_end(key)
        driver.assert_all_blocks_are_back()
    assert comparison.num_runs > 10 or Driver.steps_ahead
    assert Choice.FILTERED in comparison.choices
    assert comparison.fill_rows >= {2, 4, 8}
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 10)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_head_graphs_draft_the_same_without_filters(grouped: Tiny, comparison: Comparison, temperature: float) -> None:
    tiny, make_head = with_head(grouped)
    speculator = MixedSpeculator({}, share_head=1.0)
    with Driver(tiny, speculator=speculator, make_head=make_head, **GRAPHS, max_num_seqs=2) as driver:
        driver.generate([5, 6, 7], 40, temperature=temperature, seed=3)
    assert comparison.num_runs
    assert comparison.choices == {Choice.SAMPLED if temperature else Choice.GREEDY}
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 10)


@pytest.mark.parametrize(
    ("name", "share_bare"),
    [("mistral-window", 0.5), ("gemma3", 0.0), ("llama4", 0.5), ("deepseek", 0.0), ("glm4-moe", 0.0)],
)
def test_head_graphs_draft_the_same_in_every_family(
    name: str,
    share_bare: float,
    family_of: Callable[[str], TinyFamily],
    comparison: Comparison,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows, chunks, experts and latent keys; with preemptions, bare tokens, and NaN in all free pages."""
    tiny, make_head = with_head(family_of(name))
    prompts = [[(5 * i * i + 3 * i + 7 * (i > 20) * length) % 110 + 3 for i in range(length)] for length in (9, 23, 40)]
    speculator = MixedSpeculator({}, share_bare=share_bare)
    num_blocks = 30 * len(kv_groups(tiny.config).spans)
    sizes = {**GRAPHS, "chunk_tokens": 16, "num_blocks": num_blocks, "max_num_seqs": 3, "eos_token_ids": ()}
    with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
        poison = Poison(monkeypatch)
        poison.blocks = driver.pool().fill_(float("nan"))
        for turn in ("cold", "warm"):
            keys = [driver.submit(f"{turn}-{i}", prompt, 30) for i, prompt in enumerate(prompts)]
            for key, prompt in zip(keys, prompts, strict=True):
                assert tiny.is_greedy(prompt, driver.wait_end(key).tokens)
        driver.assert_all_blocks_are_back()
    assert comparison.num_runs
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 20)


def test_head_graphs_leave_out_what_has_no_room(
    grouped: Tiny, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only two sequences have graphs; a third one makes the passes run without."""
    monkeypatch.setattr("weft.engine.graph_shapes.MAX_SIZE", 2)
    started: list[tuple[int, bool]] = []
    start = HeadGraphs.start

    def watched(self: HeadGraphs, rows: Any, ends: Items[int], sampling: Any) -> GraphRun | None:
        run = start(self, rows, ends, sampling)
        started.append((len(ends), run is not None))
        return run

    monkeypatch.setattr(HeadGraphs, "start", watched)
    tiny, make_head = with_head(grouped)
    speculator = MixedSpeculator({}, share_head=1.0)
    with Driver(tiny, speculator=speculator, make_head=make_head, **GRAPHS, max_num_seqs=3) as driver:
        keys = [driver.submit(str(i), [5, 6 + i, 7], 30 + 12 * i) for i in range(3)]
        for key in keys:
            driver.wait_end(key)
    assert all(num_seqs <= 2 or not is_run for num_seqs, is_run in started)
    assert {num_seqs for num_seqs, is_run in started if is_run} == {1, 2}
    assert 3 in {num_seqs for num_seqs, _ in started}
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "llama4", "deepseek"])
def test_drafts_in_replayed_graphs_give_the_tokens_of_transformers(
    name: str, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny, make_head = with_head(family_of(name))
    prompts = [[(7 * i * i + length) % 110 + 3 for i in range(length)] for length in (2, 17, 40)]
    turns = ("captured", "replayed")
    texts = {f"{turn}-{i}": prompt + tiny.greedy(prompt, 30) for turn in turns for i, prompt in enumerate(prompts)}
    speculator = MixedSpeculator(texts)
    sizes: dict[str, Any] = {**GRAPHS, "num_blocks": 256, "max_num_seqs": 4, "eos_token_ids": ()}
    with Driver(tiny, device="cuda", speculator=speculator, make_head=make_head, **sizes) as driver:
        for turn in turns:
            keys = [driver.submit(f"{turn}-{i}", prompt, 30) for i, prompt in enumerate(prompts)]
            for key, prompt in zip(keys, prompts, strict=True):
                assert tiny.is_greedy(prompt, driver.wait_end(key).tokens)
    assert speculator.drafted
    assert speculator.num_accepted
