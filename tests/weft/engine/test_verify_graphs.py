"""Steps with drafts in graphs give the bits of the same steps without graphs: logits, KV, and features for a head.

On a CPU a graph is run again instead of replayed; everything around that is what a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.weft.engine.harness import Driver
from tests.weft.engine.poison import Poison
from tests.weft.engine.scripted import ScriptedSpeculator, reader_of
from tests.weft.engine.test_speculation import CASES, PROMPT, SIZES, assert_equal, prompt_of, submit
from tests.weft.engine.tiny_heads import MixedSpeculator, SlowTwin, assert_drafts_are_those_of, with_head
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import DecodeStep
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.executor import ModelExecutor
from weft.engine.graph_shapes import MAX_ROWS, GraphShape, GraphShapes, graph_rows
from weft.engine.step_input import StepInput
from weft.model.kv_layout import kv_groups
from weft.request import NO_DRAFTS, Speculation

GRAPHS: dict[str, Any] = {**SIZES, "decode_graphs": True, "max_drafts": 7}


class Replay(NamedTuple):
    """A replayed step: its graph, and the rows of its sequences."""

    shape: GraphShape
    rows: list[int]


@dataclass
class Steps:
    """Steps of sequences that decode: the replayed ones, and the shortest context of each of the others."""

    replays: list[Replay] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A step with a graph runs first without it, on the same memory. The replay must give the same bits."""
    seen = Steps()
    forward = ModelExecutor.forward

    def twice(self: ModelExecutor, step: StepInput, sampled: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = None if self.graphs is None else self.graphs.shape_of(step)
        if shape is None:
            if self.graphs is not None and all(step.decodes):
                seen.others.append(min(map(min, step.lens)))
            return forward(self, step, sampled)
        seen.replays.append(Replay(shape, [end - start for start, end in pairwise(step.starts)]))
        num_blocks, num_places = self.pool_memory.num_blocks, 0 if self.head is None else self.head._num_places
        kept = [self.pool.memory[:num_blocks]] + ([] if self.head is None else [self.head._features[:num_places]])
        before = [each.clone() for each in kept]
        graphs, self.graphs = self.graphs, None
        expected = forward(self, step, sampled)[0].clone()
        after = [each.clone() for each in kept]
        self.graphs = graphs
        for memory, bits in zip(kept, before, strict=True):
            memory.copy_(bits)
        logits, hidden = forward(self, step, sampled)
        assert torch.equal(logits, expected)
        for memory, bits in zip(kept, after, strict=True):
            assert torch.equal(memory.view(torch.int32), bits.view(torch.int32))
        return logits, hidden

    monkeypatch.setattr(ModelExecutor, "forward", twice)
    return seen


def test_sequences_have_graphs_with_room_for_their_drafts() -> None:
    assert [graph_rows(max_drafts) for max_drafts in (0, 1, 2, 3, 4, 7, 15)] == [
        (1,),
        (1, 2),
        (1, 2, 4),
        (1, 2, 4),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
    ]
    sizes = [(6, 7), (64, 7), (256, 7), (256, 3), (1000, 1), (1000, 0)]
    configs = [EngineConfig(8, 16, 100, 64, max_num_seqs=seqs, max_drafts=drafts) for seqs, drafts in sizes]
    assert [GraphShapes(each).largest for each in configs] == [(6, 8), (64, 8), (64, 8), (128, 4), (256, 2), (256, 1)]


@pytest.mark.parametrize("share_right", [0.0, 0.8, 1.0])
def test_verify_graphs_change_no_text(grouped: Tiny, steps: Steps, share_right: float) -> None:
    with Driver(grouped, **SIZES) as driver:
        plain = {name: driver.wait_end(submit(driver, name)) for name in CASES}
    assert not steps.replays
    texts = {name: prompt_of(name) + heard.tokens for name, heard in plain.items()}
    speculator = ScriptedSpeculator(reader_of(texts), share_right, is_varied=True)
    with Driver(grouped, **GRAPHS, max_num_seqs=9, speculator=speculator) as driver:
        keys = [submit(driver, name) for name in CASES]
        for key in keys:
            assert_equal(driver.wait_end(key), plain[key.request_id])
        driver.assert_all_blocks_are_back()
        assert sum((driver.heard[key].drafts for key in keys), NO_DRAFTS).verified
    assert {shape.num_rows for shape, _ in steps.replays} >= {4, 8}
    if share_right == 0.8:
        assert any(len(rows) < shape.num_seqs for shape, rows in steps.replays), "no step had a padding sequence"
    assert any(len(rows) == shape.num_seqs and 1 in rows and shape.num_rows == 8 for shape, rows in steps.replays)


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "gemma3", "qwen3-moe", "llama4", "deepseek", "gpt-oss"])
def test_verify_graphs_give_the_same_bits_in_every_family(
    name: str, family_of: Callable[[str], TinyFamily], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, chunks, experts and latent keys; with preemptions, and NaN in all free pages."""
    tiny = family_of(name)
    prompts = [[(5 * i * i + 3 * i + 7 * (i > 20) * length) % 110 + 3 for i in range(length)] for length in (2, 23, 40)]
    texts = {str(i): prompt + tiny.greedy(prompt, 30) for i, prompt in enumerate(prompts)}
    speculator = ScriptedSpeculator(reader_of(texts), share_right=0.8, is_varied=True)
    sizes = {**GRAPHS, "num_blocks": 30 * len(kv_groups(tiny.config).spans), "max_num_seqs": 3, "eos_token_ids": ()}
    with Driver(tiny, speculator=speculator, **sizes) as driver:
        poison = Poison(monkeypatch)
        poison.blocks = driver.pool().fill_(float("nan"))
        keys = [driver.submit(str(i), prompt, 30) for i, prompt in enumerate(prompts)]
        for key, prompt in zip(keys, prompts, strict=True):
            assert tiny.is_greedy(prompt, driver.wait_end(key).tokens)
        driver.assert_all_blocks_are_back()
    assert {shape.num_rows for shape, _ in steps.replays} >= {2, 4, 8}
    assert speculator.num_accepted


@pytest.mark.parametrize("max_drafts", [15, 4])
def test_steps_that_no_graph_fits_run_without(grouped: Tiny, steps: Steps, max_drafts: int) -> None:
    """More drafts than the decode kernel takes, or a context shorter than the graph's rows."""
    with Driver(grouped, **SIZES) as driver:
        text = driver.generate([7, 8], 40).tokens
    speculator = ScriptedSpeculator(lambda sequence, count: text[len(sequence.token_ids) - 2 :][:count])
    with Driver(grouped, speculator=speculator, **{**GRAPHS, "max_drafts": max_drafts}) as driver:
        assert driver.generate([7, 8], 40).tokens == text
    verified = [step.num_rows for step in speculator.steps if step.num_rows > 1]
    replayed = [replay.rows[0] for replay in steps.replays if replay.rows[0] > 1]
    if max_drafts == 15:
        assert max(verified) == 16
        assert replayed == [rows for rows in verified if rows <= 8]
        assert len(steps.others) == len(verified) - len(replayed)
    else:
        assert all(context < 8 for context in steps.others)
        assert replayed == verified[len(steps.others) :]
    assert replayed
    assert steps.others or Driver.steps_ahead  # the loop ahead asks first behind a longer context


def test_head_drafts_the_same_when_steps_are_graphs(grouped: Tiny, steps: Steps) -> None:
    """Padding rows leave features too, and rows of a draft model read those of their own tokens."""
    tiny, make_head = with_head(grouped)
    with Driver(grouped, **SIZES) as driver:
        plain = {name: driver.wait_end(submit(driver, name)) for name in CASES}
    texts = {name: prompt_of(name) + heard.tokens for name, heard in plain.items()}
    speculator = MixedSpeculator(texts)
    with Driver(tiny, speculator=speculator, make_head=make_head, **GRAPHS, max_num_seqs=5) as driver:
        keys = [submit(driver, name) for name in CASES]
        for key in keys:
            assert_equal(driver.wait_end(key), plain[key.request_id])
        # Replayed steps fill the draft layer of blocks that another sequence drafts behind.
        off = driver.generate(PROMPT, 64, "off", speculation=Speculation(is_enabled=False))
        texts["rest"] = PROMPT + off.tokens
        start, num_drafted = PROMPT + off.tokens[:17], len(speculator.drafted)
        rest = driver.generate(start, 64, "rest", resumed_tokens=17)
        assert rest.num_cached == len(start) // 4 * 4
        assert rest.tokens == off.tokens[17:]
        assert len(speculator.drafted) > num_drafted
    assert {shape.num_rows for shape, _ in steps.replays} == {1, 2, 4, 8}
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 10)


class EvenSpeculator(AdaptiveSpeculator):
    """All steps take the same time, so that only acceptance decides."""

    def on_step(self, step: DecodeStep) -> None:
        super().on_step(replace(step, seconds=0.01))


def test_chosen_drafts_replay_graphs(grouped: Tiny, steps: Steps) -> None:
    """Predictions of two answers: one is right, and one ends early."""
    prompts = {"one": [5, 6, 7], "two": [8, 9, 10, 11]}
    with Driver(grouped, **SIZES) as driver:
        texts = {name: driver.generate(prompt, 80, name).tokens for name, prompt in prompts.items()}
    predictions = {"one": texts["one"], "two": texts["two"][:40]}
    speculator = EvenSpeculator((), clock=lambda: 0.0, graph_rows=GraphRows(graph_rows(7), MAX_ROWS))
    with Driver(grouped, speculator=speculator, **GRAPHS, max_num_seqs=2) as driver:
        keys = [
            driver.submit(name, prompt, 80, speculation=Speculation(prediction=tuple(predictions[name])))
            for name, prompt in prompts.items()
        ]
        assert [driver.wait_end(key).tokens for key in keys] == list(texts.values())
    assert all(context < 8 for context in steps.others)
    assert any(max(replay.rows) == 8 for replay in steps.replays)
    assert sum(len(replay.rows) for replay in steps.replays) < 100, "drafts saved no steps"
