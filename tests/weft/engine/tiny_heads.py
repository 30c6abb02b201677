"""Random EAGLE-3 heads for tiny models, and what such a head drafts when all its rows are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tests.weft.engine.harness import Driver
from tests.weft.engine.scripted import ScriptedSpeculator, reader_of
from tests.weft.tiny_llama import Tiny
from weft.engine.device_copier import DeviceCopier
from weft.engine.drafting.drafter import DraftRequest, DraftSource, Proposal
from weft.engine.sampler import SamplingRowsMaker
from weft.engine.sequence import Sequence
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel, DraftRows, DraftTarget
from weft.model.draft_config import DraftConfig, draft_config_of
from weft.model.draft_layers import draft_place, with_draft
from weft.model.eagle import EagleHead
from weft.model.fields import Fields
from weft.model.kv_layout import block_bytes, group_heads, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.spec import ModelConfig
from weft.model.step import Capture, TokenBatch
from weft.request import SamplingParams
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.sampling import sample, sample_drafts

HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 16, 48
DRAFT_VOCABULARY = 60  # smaller than the target's
CPU = torch.device("cpu")
MakeHead = Callable[[Decoder], DraftModel]
AnyTiny = TypeVar("AnyTiny", bound=Tiny)


def head_tensors(target: ModelConfig, num_features: int) -> dict[str, Tensor]:
    """The same random numbers every time."""
    hidden, random = target.hidden_size, torch.Generator().manual_seed(4)
    shapes = {
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (MLP, hidden),
        "midlayer.mlp.up_proj": (MLP, hidden),
        "midlayer.mlp.down_proj": (hidden, MLP),
        "fc": (hidden, num_features * hidden),
        "lm_head": (DRAFT_VOCABULARY, hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=random) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    tensors |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms} | {"norm.weight": torch.ones(hidden)}
    places = torch.randperm(target.vocab_size, generator=random)[:DRAFT_VOCABULARY].sort().values
    return tensors | {"d2t": places - torch.arange(DRAFT_VOCABULARY)}


def head_config(target: ModelConfig, boundaries: tuple[int, ...]) -> DraftConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden_size,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": target.max_positions,
        "eagle_config": {"boundaries": list(boundaries)},
        "num_aux_hidden_states": len(boundaries),
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
    }
    tensors = head_tensors(target, len(boundaries))
    names = {torch.float32: "F32", torch.int64: "I64"}
    stored = {name: (names[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    return draft_config_of(Fields(Path("config.json"), fields), stored, target)


def with_head(tiny: AnyTiny, boundaries: tuple[int, ...] = (0, 1, 2)) -> tuple[AnyTiny, MakeHead]:
    """Return the model with a draft layer in its pages, and what makes the head for it."""
    draft = head_config(tiny.config, boundaries)
    config = with_draft(tiny.config, draft.layer)

    def make(model: Decoder) -> DraftModel:
        tensors = head_tensors(tiny.config, len(boundaries))
        return EagleHead(draft, tensors, DraftTarget.of(model), draft_place(config))

    return replace(tiny, config=config), make


@dataclass(frozen=True)
class HeadedTiny(Tiny):
    """A model with a draft layer in its pages. `make_head`: makes the head for it."""

    make_head: MakeHead


def headed(tiny: Tiny) -> HeadedTiny:
    model, make = with_head(tiny)
    return HeadedTiny(model.oracle, model.directory, model.config, make)


class SlowTwin:
    """Drafts after any text with one pass over all of it: no page is kept, shared or handed over."""

    def __init__(self, tiny: Tiny, make_head: MakeHead) -> None:
        self.model = Decoder(tiny.config, tiny.weights, torch.float32, CPU)
        self.head = make_head(self.model)
        self._rows_of = SamplingRowsMaker(DeviceCopier(CPU))
        self.draft = cache(self._draft)

    @torch.inference_mode()
    def _draft(self, token_ids: tuple[int, ...], count: int, params: SamplingParams, num_bare: int) -> list[int]:
        """Return `count` drafts after the tokens; the draft model sees no slot before `num_bare`."""
        head, length, first = self.head, len(token_ids), max(1, num_bare)
        batches, slots = self._pool(length + count)
        state = head.fuse(self._features(token_ids[:-1])[first - 1 :])
        ids, positions, drafts = torch.tensor(token_ids[first:]), torch.arange(first, length), list[int]()
        while True:
            # Slots are one less than the engine's, as slot 0 of the engine's draft layer stays empty.
            rows = DraftRows(ids, positions, slots[:, positions - 1])
            end = int(positions[-1])
            state = head.forward(state, rows, batches(len(ids), end, first - 1))[-1:]
            drafts.append(self._choose(head.logits(state), params, length + len(drafts)))
            if len(drafts) == count:
                return drafts
            ids, positions = torch.tensor(drafts[-1:]), torch.tensor([end + 1])

    def _features(self, token_ids: Items[int]) -> Tensor:
        model, head, count = self.model, self.head, len(token_ids)
        batches, slots = self._pool(count)
        positions = torch.arange(count)
        out = torch.empty(count, len(head.boundaries), model.config.hidden_size)
        rows = TokenBatch(torch.tensor(token_ids), positions, slots[:, :count], positions[-1:])
        model.hidden(rows, batches(count, count, 0), Capture(head.boundaries, out))
        return out

    def _choose(self, logits: Tensor, params: SamplingParams, position: int) -> int:
        rows, vocabulary = self._rows_of([params], [position]), self.head.vocabulary
        chosen = sample(logits, rows) if vocabulary is None else sample_drafts(logits, rows, vocabulary)
        return int(chosen[0])

    def _pool(self, num_tokens: int) -> tuple[Callable[[int, int, int], list[PagedBatch]], Tensor]:
        """Return what makes the batches of `count` rows up to token `end` that see slots from `first` on.

        Also returns the slots [groups, tokens].
        """
        config = self.model.config
        num_groups, num_blocks = len(kv_groups(config).groups), -(-num_tokens // 16)
        memory = torch.zeros(num_groups * num_blocks, block_bytes(config, "float32", 16) // 4)
        pool: PagedPool = paged_pool(config, memory, 16)
        heads = list(group_heads(config))

        def batches(count: int, end: int, first: int) -> list[PagedBatch]:
            tables = [range(group * num_blocks, (group + 1) * num_blocks) for group in range(num_groups)]
            return [
                PagedBatch(pool, number, [0, count], [end], [table], first=[first])
                for number, table in zip(heads, tables, strict=True)
            ]

        starts = torch.arange(num_groups)[:, None] * num_blocks * 16
        return batches, starts + torch.arange(num_blocks * 16)


class Drafted(NamedTuple):
    """What the head drafted after a text. `num_bare`: see `Sequence`."""

    token_ids: tuple[int, ...]
    proposal: Proposal
    params: SamplingParams
    num_bare: int


class MixedSpeculator(ScriptedSpeculator):
    """Asks the head before every step, and verifies its drafts, scripted ones or none.

    - `drafted`: texts, and what the head drafted after them.
    - `share_bare`: of steps that do not fill the draft layer, several in a row.
    """

    def __init__(
        self, texts: Mapping[str, Items[int]], max_drafts: int = 5, share_head: float = 0.4, share_bare: float = 0.0
    ) -> None:
        super().__init__(reader_of(texts), share_right=0.8, is_varied=True)
        self.share_bare, self._are_bare, self._bare_chance = share_bare, dict[Sequence, bool](), Random(8)
        self.drafted: list[Drafted] = []
        self._max_drafts, self._share_head = max_drafts, share_head
        self._chance = Random(7)

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        if sequence not in self._are_bare or self._bare_chance.random() < 0.2:
            self._are_bare[sequence] = self._bare_chance.random() < self.share_bare
        return not self._are_bare[sequence]

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        assert self.head is not None
        scripted = super().propose(requests, num_prompt_rows)
        if self._chance.random() < 0.3:
            return scripted
        asked = [each._replace(limit=min(each.limit, self._chance.randint(0, self._max_drafts))) for each in requests]
        found = self.head.draft(asked, lambda sequence, drafts: True)
        for (sequence, limit), proposal in zip(asked, found, strict=True):
            assert len(proposal) <= limit
            assert {draft.source for draft in proposal} <= {DraftSource.HEAD}
            if proposal:
                text = tuple(sequence.token_ids)
                self.drafted.append(Drafted(text, proposal, sequence.spec.sampling, sequence.num_bare))
        chosen = [
            drafts if drafts and self._chance.random() < self._share_head else other
            for drafts, other in zip(found, scripted, strict=True)
        ]
        self.proposed.update(zip((each.sequence for each in requests), chosen, strict=True))
        return chosen

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self._are_bare.pop(sequence, None)
        if self.head is not None:
            self.head.forget(sequence)


def assert_drafts_are_those_of(twin: SlowTwin, drafted: Items[Drafted], at_least: int = 20) -> None:
    # The loop that runs ahead asks rarely while nothing is proposed.
    assert len(drafted) >= (2 if Driver.steps_ahead and at_least else at_least)
    for token_ids, proposal, params, num_bare in drafted:
        expected = twin.draft(token_ids, len(proposal), params, num_bare)
        assert [draft.token_id for draft in proposal] == expected, f"after {len(token_ids)} tokens"
