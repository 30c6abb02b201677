"""Draft heads of five formats give the numbers of the projects that publish them, see `eagle/record.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.weft.model.eagle.heads import PRODUCERS, TARGET, read_head
from tests.weft.model.packers import FORMATS, pack
from weft.model.draft import DraftRows
from weft.model.draft_layers import draft_place, with_draft
from weft.model.eagle import EagleHead
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.spec import Latent
from weft_kernels.paged_attention import PagedBatch

PROMPT, BLOCK_TOKENS = 12, 4


class Slots:
    """The head's own small pool, in pages that are in no order. Row k of a sequence lies in slot k of its pages."""

    def __init__(self, model: EagleHead, num_rows: int) -> None:
        config = model.config
        self.table = [(3 * page + 1) % 7 for page in range(-(-num_rows // BLOCK_TOKENS))]
        pages = torch.full((7, block_bytes(config, "float32", BLOCK_TOKENS) // 4), float("nan"))
        pages[self.table] = 0
        self.pool = paged_pool(config, pages, BLOCK_TOKENS)
        self.num_heads = config.num_heads

    def rows(self, tokens: Tensor, first: int) -> tuple[DraftRows, list[PagedBatch]]:
        places = torch.arange(first, first + len(tokens))
        slots = torch.tensor(self.table)[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
        batch = PagedBatch(self.pool, self.num_heads, [0, len(tokens)], [first + len(tokens)], [self.table])
        return DraftRows(tokens, places + 1, slots[None]), [batch]


@pytest.mark.parametrize("chunk", [1, 5, PROMPT])
@pytest.mark.parametrize("name", PRODUCERS)
def test_head_gives_the_numbers_of_its_project(name: str, chunk: int, tmp_path: Path) -> None:
    head = read_head(name)
    model, recorded = head.model(tmp_path), head.recorded
    tokens, states = recorded["tokens"], list[Tensor]()
    assert model.draft.producer is PRODUCERS[name]
    assert model.boundaries == (2, 6, 9)
    with torch.inference_mode():
        fused = model.fuse(recorded["features"])
        slots = Slots(model, len(tokens))
        for first in range(0, PROMPT, chunk):
            part = slice(first, min(first + chunk, PROMPT))
            states.append(model.forward(fused[part], *slots.rows(tokens[part], first)))
        for step in range(PROMPT, len(tokens)):
            token = model.target_ids(model.logits(states[-1][-1:]).argmax(-1))
            assert token.tolist() == [int(tokens[step])]
            states.append(model.forward(states[-1][-1:], *slots.rows(token, step)))
        logits = model.logits(torch.cat(states))
    for found, expected in ((fused, "fused"), (torch.cat(states), "states"), (logits, "logits")):
        scale = float(recorded[expected].std())
        torch.testing.assert_close(found / scale, recorded[expected] / scale, rtol=1e-5, atol=1e-5)


def prompt_states(model: EagleHead, recorded: dict[str, Tensor]) -> Tensor:
    slots = Slots(model, PROMPT)
    with torch.inference_mode():
        return model.forward(model.fuse(recorded["features"]), *slots.rows(recorded["tokens"][:PROMPT], 0))


@pytest.mark.parametrize("name", ["safeai", "kimi"])
def test_matrices_that_stay_packed_give_the_same_bits(name: str, tmp_path: Path) -> None:
    head = read_head(name)
    states = [prompt_states(head.model(tmp_path, is_resident), head.recorded) for is_resident in (False, True)]
    assert torch.equal(*states)


@pytest.mark.parametrize(("name", "kind"), [("modelopt", "modelopt-fp8"), ("kimi", "modelopt-nvfp4")])
def test_quantized_head_is_that_of_its_unpacked_weights(name: str, kind: str, tmp_path: Path) -> None:
    packed, plain = read_head(name), read_head(name)
    skipped = "lm_head", "layers.0.self_attn.q_b_proj"  # the latter has no whole groups of inputs
    packed.config["quantization_config"] = {**FORMATS[kind], "ignore": list(skipped)}
    for key, tensor in plain.tensors.items():
        if tensor.ndim == 2 and not key.startswith(skipped):
            parts, plain.tensors[key] = pack(key.removesuffix(".weight"), tensor.float(), FORMATS[kind])
            del packed.tensors[key]
            packed.tensors |= parts
    states = []
    for head in (packed, plain):
        states.append(prompt_states(head.model(tmp_path), head.recorded))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4 * float(states[1].std()))


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("name", ["safeai", "kimi"])
def test_layer_in_the_pages_of_its_target_gives_the_same_bits(name: str, is_latent: bool, tmp_path: Path) -> None:
    """Heads with the target's kind of attention and with the other one; every other plane is poisoned."""
    head, latent = read_head(name), Latent(24, 32, 16, 8, 16, 0.2)
    target = replace(TARGET, latent=latent, num_kv_heads=1, head_dim=40) if is_latent else TARGET
    own = head.model(tmp_path)
    config = with_draft(target, own.config)
    place = draft_place(config)
    assert place == (len(kv_groups(config).groups) - 1, TARGET.num_layers)
    count = block_bytes(config, "float32", BLOCK_TOKENS) // 4
    pages = torch.full((3, count), float("nan"))
    pool = paged_pool(config, pages, BLOCK_TOKENS)
    cache = pool.layers[place[1]]
    cache.keys.zero_()
    cache.values.zero_()
    model = EagleHead(own.draft, head.tensors, head.draft_target(), place)
    tokens, places = head.recorded["tokens"][:PROMPT], torch.arange(PROMPT)
    batch = PagedBatch(pool, own.config.num_heads, [0, PROMPT], [PROMPT], [[2, 0, 1]])
    slots = torch.tensor([2, 0, 1])[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
    rows = DraftRows(tokens, places + 1, slots.expand(place[0] + 1, -1).contiguous())
    with torch.inference_mode():
        states = model.forward(model.fuse(head.recorded["features"]), rows, [batch] * (place[0] + 1))
    assert torch.equal(states, prompt_states(own, head.recorded))
    assert int(pages.isfinite().sum()) == cache.keys.numel() + (cache.values.numel() if name == "safeai" else 0)
