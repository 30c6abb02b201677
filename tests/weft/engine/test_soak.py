"""Freed blocks are poisoned with NaN while sequences come, go, are cancelled, preempted and handed over at random.

Nothing of that may show: every token is the one that the sequence gets alone, and no block is lost. `make soak` runs
100,000 steps a family, `make test` some hundreds. The driver acts on the engine's own thread, in its listener, so that
a run is the same every time. Models are as small as they can be with every kind of layer that the family has: what is
tested is which pages are read, not what is computed from them.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver
from tests.weft.engine.late import LateRunner
from tests.weft.engine.poison import Poison
from tests.weft.engine.soak_texts import FAMILIES, MAX_NEW, Live, Text, make_texts
from tests.weft.engine.test_logits_processor import EveryThird
from tests.weft.engine.tiny_heads import MakeHead, MixedSpeculator, with_head
from tests.weft.tiny_families import make_family
from tests.weft.tiny_llama import Tiny
from weft.engine import runner
from weft.engine.config import EngineConfig
from weft.engine.head_executor import HeadExecutor
from weft.engine.messages import EngineLoad, FirstToken, Reserved, SequenceMode, SequenceSpec, StepOutput, TokenDelta
from weft.kv.layer_groups import PageRange
from weft.model.decoder import Decoder
from weft.model.kv_layout import draft_group, kv_groups
from weft.request import FinishReason, RequestKey

NUM_STEPS = int(os.environ.get("WEFT_SOAK_STEPS", "600"))
NUM_DRAFTING_STEPS = NUM_STEPS // 3
NUM_BLOCKS, BLOCK_TOKENS, MAX_LIVE = 26, 4, 12  # blocks for each group of layers
STUCK_SECONDS, TOLD_STEPS = 60.0, 10_000
# prompts are computed by how long they have waited: the engine's time passes with its looks at the clock
LOOK_SECONDS = 0.001
PLAIN_RUNNER = vars(runner)["ModelRunner"]
TextsOf = Callable[[str], tuple[Tiny, list[Text]]]
LATE_FAMILIES = ["llama2", "mistral-window"]  # pages that are kept, and pages that go back in the midst of a text


def crowded(tiny: Tiny) -> EngineConfig:
    """Room for fewer sequences than there are."""
    reaches = kv_groups(tiny.config).spans
    return EngineConfig(
        num_blocks=NUM_BLOCKS * len(reaches),
        spans=reaches,
        block_tokens=BLOCK_TOKENS,
        vocab_size=tiny.config.vocab_size,
        max_context_tokens=tiny.config.max_positions,
        chunk_tokens=11,
        max_num_seqs=7,
        steps_ahead=Driver.steps_ahead,
        draft_group=draft_group(tiny.config),
        decode_graphs=vars(runner)["ModelRunner"] is LateRunner,  # and all else as on a GPU
        pin_sealed=True,
        max_pinned=3,
    )


class Chaos:
    """Asks for everything that an engine can be asked for, at random, and checks what it says."""

    def __init__(
        self, tiny: Tiny, texts: list[Text], poison: Poison, seed: int, make_head: MakeHead | None = None
    ) -> None:
        """`make_head`: a head that drafts, as a script does that knows the texts; None: nothing drafts."""
        self.random = random.Random(seed)
        self.texts = texts
        self.live: dict[RequestKey, Live] = {}
        self.held: dict[RequestKey, tuple[Live, tuple[PageRange, ...], int]] = {}
        self.suspects: list[int] = []
        self.pinned: list[int] = []
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.is_over = threading.Event()
        self.vocab_size = tiny.config.vocab_size
        self.whole: dict[str, tuple[int, ...]] = {}  # prompts with their texts, by request
        self.speculator = None if make_head is None else MixedSpeculator(self.whole, share_bare=0.3)
        looks = count()
        model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
        self.engine = runner.assemble(
            model,
            "float32",
            crowded(tiny),
            self.hear,
            lambda: LOOK_SECONDS * next(looks),
            speculator=self.speculator,
            head=None if make_head is None else make_head(model),
        )
        if isinstance(self.engine._runner, LateRunner):
            self.engine._runner.free = self.engine._loop._pool._free
        memory = self.engine.pool_memory
        raw = (ctypes.c_char * (memory.num_blocks * memory.block_bytes)).from_address(memory.address)
        self.blocks = torch.frombuffer(raw, dtype=torch.float32).view(memory.num_blocks, -1)
        poison.blocks = self.blocks
        poison.fill(range(memory.num_blocks))
        self.poison = poison

    def run(self, num_steps: int) -> None:
        """Until so many steps have been and all sequences have ended, or something is wrong."""
        self.num_steps = num_steps
        self.engine.start()
        self.begin()
        num_heard = -1
        while not self.is_over.wait(STUCK_SECONDS) and num_heard != self.counts["heard"]:
            num_heard = self.counts["heard"]
        is_over = self.is_over.is_set()
        self.is_over.set()
        self.engine.stop()
        assert not self.errors, self.errors[:3]
        assert is_over, f"stuck after {self.counts}"

    def hear(self, output: StepOutput) -> None:
        """On the engine's thread. What it raises would only end that thread: it is kept for the test."""
        if self.is_over.is_set():
            return
        try:
            self.check(output)
            self.act(output)
        except Exception as error:
            self.errors.append(repr(error))
        if self.errors or (self.counts["steps"] >= self.num_steps and self.has_settled(output.load)):
            self.is_over.set()

    def has_settled(self, load: EngineLoad) -> bool:
        """Nothing lives, and the engine has heard of it: what is posted after its end is lost."""
        return not (self.live or self.held or load.active_blocks or load.quarantined_blocks or load.active_tokens)

    def check(self, output: StepOutput) -> None:
        load = output.load
        self.counts["heard"] += 1
        if output.step_seconds > 0:
            self.counts["steps"] += 1
            if not self.counts["steps"] % TOLD_STEPS:
                print(f"{time.strftime('%X')} {self.counts['steps']:,} steps", flush=True)
        total = load.free_blocks + load.cached_blocks + load.active_blocks + load.quarantined_blocks
        assert total == len(self.blocks), f"{total} blocks of {len(self.blocks)}"
        assert not output.failures, output.failures
        for delta in output.deltas:
            self.take(delta)
        running = [each for each in self.live.values() if each.tokens]
        self.counts["preempted"] += len(running) > load.num_running

    def take(self, delta: TokenDelta) -> None:
        live = self.live.get(delta.key)
        if live is None:
            return  # cancelled, and said before that was heard
        live.tokens += delta.token_ids
        if delta.prompt is not None:
            live.num_bare = delta.prompt.num_bare_tokens
            self.counts["bare"] += live.num_bare > 0
        expected = live.awaited
        assert live.tokens == expected[: len(live.tokens)], f"{live.spec}: {live.tokens}, alone {expected}"
        if delta.finish_reason is not None:
            assert len(live.tokens) == len(expected)
            self.counts["ended"] += 1
            self.counts["stopped"] += delta.finish_reason is FinishReason.STOP
            del self.live[delta.key]

    def act(self, output: StepOutput) -> None:
        for progress in output.progress:
            live = self.live.get(progress.key)
            if live and live.tokens and progress.num_ready_tokens == len(live.spec.token_ids):
                self.held[progress.key] = (self.live.pop(progress.key), progress.page_ranges, live.tokens[0])
        for reserved in output.reserved:
            if reserved.key in self.live:
                self.live[reserved.key].reserved = reserved
                self.foretell(self.live[reserved.key])
        self.pinned += [sealed.block for sealed in output.sealed]
        is_last_round = self.counts["steps"] >= self.num_steps
        # Where nothing runs, or all that runs may lack pages, nothing else would make the engine speak again.
        num_available = output.load.free_blocks + output.load.cached_blocks
        must_act = is_last_round or not output.load.num_running or num_available <= len(self.blocks) // NUM_BLOCKS
        if not is_last_round and len(self.live) < MAX_LIVE and (must_act or self.random.random() < 0.4):
            self.begin()
        for key in list(self.live):
            self.meddle(key, must_act)
        if must_act and not is_last_round and not self.live:  # what has just begun may be cancelled already, unheard
            self.begin()
        for key in list(self.held):
            if self.random.random() < 0.1 or must_act:
                del self.held[key]
                self.engine.release(key)
        self.let_go(must_act)

    def begin(self) -> None:
        """One more sequence: generating, prefilling, or waiting for somebody else's KV."""
        key = RequestKey(f"soak-{self.counts['begun']}")
        held = [live for live, _, _ in self.held.values()]
        kind = self.random.choice(("generate", "generate", "generate", "prefill", "wait", *(["wait"] * 2 * len(held))))
        like = self.random.choice(held) if held and kind == "wait" else None
        text = like.text if like else self.random.choice(self.texts)
        # some go on with what another worker has begun
        num_resumed = like.spec.resumed_tokens if like else self.random.choice((0, 0, 7))
        sampling = replace(text.sampling, max_tokens=self.random.randrange(num_resumed + 1, MAX_NEW + 1))
        if not sampling.min_tokens and self.random.random() < 0.3:
            # an end that only the token tells: with a step under way that goes on
            sampling = replace(sampling, stop_token_ids=(self.random.choice(text.expected),))
        spec = SequenceSpec(
            key,
            (*text.prompt, *text.expected[:num_resumed]),
            sampling,
            SequenceMode.PREFILL if kind == "prefill" else SequenceMode.GENERATE,
            self.random.choice((b"", b"", b"other")),
            wait_for_kv=kind == "wait",
            resumed_tokens=num_resumed,
            constraint=EveryThird(self.vocab_size) if text.is_constrained else None,
            is_bare=self.speculator is not None and kind == "prefill" and self.random.random() < 0.3,
        )
        self.whole[key.request_id] = (*text.prompt, *text.expected)
        self.live[key] = Live(text, spec)
        self.counts["begun"] += 1
        self.counts[kind] += 1
        self.engine.submit(spec)

    def meddle(self, key: RequestKey, must_act: bool) -> None:
        """Cancel it, or bring what it waits for."""
        live = self.live[key]
        if self.random.random() < 0.01:
            self.counts["cancelled"] += 1
            del self.live[key]
            self.engine.cancel(key)
        elif live.reserved and (must_act or self.random.random() < 0.3):
            self.bring(live)

    def bring(self, live: Live) -> None:
        """The KV of a held prefill of the same prompt, where there is one; else nothing, or writes gone astray."""
        reserved, live.reserved = live.reserved, None
        assert reserved is not None
        num_hits = reserved.num_hit_tokens // BLOCK_TOKENS  # those blocks are shared: nobody writes there
        for held, runs, token in self.held.values():
            num_tokens = len(live.spec.token_ids)
            if held.text is live.text and len(held.spec.token_ids) == num_tokens:
                self.copy(runs, reserved, num_hits, num_tokens)
                self.counts["handed over"] += 1
                self.engine.complete_kv(live.spec.key, num_tokens, FirstToken(token), num_bare_tokens=held.num_bare)
                return
        blocks = [block for run in reserved.page_ranges for block in run.within(num_hits, run.end).blocks]
        suspects = [block for block in blocks[-3:] if self.random.random() < 0.5]
        self.suspects += suspects
        self.counts["suspect"] += len(suspects)
        self.engine.complete_kv(live.spec.key, 0, suspect_blocks=suspects)

    def foretell(self, live: Live) -> None:
        """Some first tokens are known ahead of the KV; whether that ever comes is another matter."""
        if self.random.random() < 0.5:
            token = live.text.expected[live.spec.resumed_tokens]
            self.counts["foretold"] += 1
            self.engine.set_first_token(live.spec.key, FirstToken(token))

    def copy(self, lent: tuple[PageRange, ...], reserved: Reserved, num_hits: int, num_tokens: int) -> None:
        """Of each group, the pages that the next token looks at."""
        paging = self.engine.paging
        for group, (theirs, ours) in enumerate(zip(lent, reserved.page_ranges, strict=True)):
            needed = paging.needed_blocks(group, num_hits, num_tokens, num_tokens)
            placed = paging.remap(group, ours, num_hits, paging.retention_point(num_tokens, num_tokens))
            places = placed.within(needed.start, needed.stop)
            self.blocks[list(places.blocks)] = self.blocks[list(theirs.within(needed.start, needed.stop).blocks)]

    def let_go(self, must_act: bool) -> None:
        """Copies and stray writes end some time; until then those writes go on."""
        self.poison.fill(self.suspects)
        for blocks, free in ((self.pinned, self.engine.unpin), (self.suspects, self.engine.unquarantine)):
            if blocks and (self.random.random() < 0.2 or must_act):
                free(list(blocks))
                blocks.clear()


@pytest.fixture(scope="module")
def texts_of(tmp_path_factory: pytest.TempPathFactory) -> TextsOf:
    """A model of a family, and its undisturbed texts."""

    def make(name: str) -> tuple[Tiny, list[Text]]:
        tiny = make_family(name, tmp_path_factory.mktemp(name), **FAMILIES[name])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Driver, "steps_ahead", 0)
            patch.setattr(runner, "ModelRunner", PLAIN_RUNNER)
            return tiny, make_texts(tiny)

    return cache(make)


@pytest.mark.timeout(120 + NUM_STEPS)  # one that is stuck is noticed sooner
@pytest.mark.parametrize("name", FAMILIES)
def test_poisoned_blocks_show_nowhere_whatever_happens(
    name: str, steps_ahead: int, texts_of: TextsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak(name, steps_ahead, texts_of, monkeypatch)


@pytest.mark.timeout(120 + NUM_STEPS)
@pytest.mark.parametrize("steps_ahead", [1], indirect=True)
@pytest.mark.parametrize("name", LATE_FAMILIES)
def test_poisoned_blocks_show_nowhere_on_a_device_that_is_late(
    name: str, steps_ahead: int, texts_of: TextsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but a page that goes back while a step under way has yet to look at it is NaN when it does."""
    monkeypatch.setattr(runner, "ModelRunner", LateRunner)
    soak(name, steps_ahead, texts_of, monkeypatch)


@pytest.mark.timeout(120 + NUM_STEPS)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama2"])
def test_poisoned_blocks_show_nowhere_while_drafting(
    name: str, steps_ahead: int, texts_of: TextsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak(name, steps_ahead, texts_of, monkeypatch, is_drafting=True)


@pytest.mark.timeout(120 + NUM_STEPS)
@pytest.mark.parametrize("steps_ahead", [1], indirect=True)
@pytest.mark.parametrize("name", LATE_FAMILIES)
def test_poisoned_blocks_show_nowhere_when_late_and_drafting(
    name: str, steps_ahead: int, texts_of: TextsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ModelRunner", LateRunner)
    soak(name, steps_ahead, texts_of, monkeypatch, is_drafting=True)


def finite_choice(choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """No text shows what drafts are made from, so NaN must be looked for in their probabilities."""

    def checked(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, probabilities = choose(*args)
        assert probabilities.isfinite().all(), "drafts were made from NaN"
        return token_ids, probabilities

    return checked


def soak(
    name: str,
    steps_ahead: int,
    texts_of: TextsOf,
    monkeypatch: pytest.MonkeyPatch,
    is_drafting: bool = False,
) -> None:
    tiny, texts = texts_of(name)
    poison, make_head = Poison(monkeypatch), None
    if is_drafting:
        tiny, make_head = with_head(tiny, (0, tiny.config.num_layers))
        monkeypatch.setattr(HeadExecutor, "choose", finite_choice(HeadExecutor.choose))
    chaos = Chaos(tiny, texts, poison, seed=5 if is_drafting else 1, make_head=make_head)
    num_steps = NUM_DRAFTING_STEPS if is_drafting else NUM_STEPS
    chaos.run(num_steps)
    print(f"{name}, {steps_ahead} steps ahead: {dict(chaos.counts)}, {poison.num_poisoned} blocks poisoned")
    load = chaos.engine.load
    assert (load.active_blocks, load.quarantined_blocks, load.active_tokens) == (0, 0, 0)
    for kind in ("ended", "cancelled", "preempted", "foretold", "handed over", "suspect", "stopped"):
        assert chaos.counts[kind], f"nothing was {kind}"
    assert poison.num_poisoned > num_steps / 10
    if chaos.speculator is not None:
        assert 0 < chaos.speculator.num_accepted < chaos.speculator.num_verified
        assert chaos.speculator.drafted
        assert chaos.counts["bare"]
        assert not chaos.speculator.known
