"""The drafting layer of a checkpoint gives the numbers of transformers, over recycled steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.weft.tiny_families import TinyFamily
from weft.errors import BadCheckpoint
from weft.model.decoder import Decoder
from weft.model.draft import DraftRows, DraftTarget
from weft.model.kv_layout import block_bytes
from weft.model.mtp import MtpLayer
from weft.model.mtp_config import mtp_config_of
from weft.model.paged_pool import paged_pool
from weft.model.spec import FINAL, Latent
from weft_kernels.paged_attention import PagedBatch

PROMPT, STEPS, BLOCK_TOKENS = 12, 5, 4
TOKENS = torch.tensor([(11 * i * i + 7 * i + 5) % 113 for i in range(PROMPT + 1)])


def make_oracle(tiny: TinyFamily) -> Any:
    target = copy.deepcopy(tiny.oracle)
    target.config.num_mtp_layers = 1
    oracle: Any = MtpModel(target, 1)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in sorted(oracle.layers.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = values + (1 if "norm" in name else 0)
    for name, buffer in oracle.layers.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return oracle.eval()


def as_stored(oracle: Any, num_layers: int) -> dict[str, Tensor]:
    """The layer's tensors as published checkpoints name them, with each expert's matrices and the shared copies."""
    root, found = f"model.layers.{num_layers}.", dict[str, Tensor]()
    for name, tensor in oracle.layers[0].state_dict().items():
        part = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", 1)
        for index, matrix in enumerate(tensor if ".experts." in name else ()):
            expert = f"{root}mlp.experts.{index}."
            if name.endswith("gate_up_proj"):
                gate, up = matrix.chunk(2)
                found |= {expert + "gate_proj.weight": gate, expert + "up_proj.weight": up}
            else:
                found[expert + "down_proj.weight"] = matrix
        if ".experts." not in name:
            found[root + part] = tensor
    found[root + "embed_tokens.weight"] = oracle.embed_tokens.weight
    found[root + "shared_head.head.weight"] = oracle.shared_head.weight
    return found


def expected_states(oracle: Any, first: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return the states of the prompt and STEPS more rows, and the drafted tokens; each step recomputes all rows."""
    ids, states, found, drafted = TOKENS[1:], first, [], []
    for step in range(STEPS + 1):
        positions = torch.arange(len(ids))[None]
        out = oracle.forward_layer(0, states[None], positions, None, input_ids=ids[None])[0]
        found.append(out if step == 0 else out[-1:])
        token = oracle.shared_head(out[-1]).argmax()
        drafted.append(int(token))
        ids, states = torch.cat((ids, token[None])), torch.cat((states, out[-1:]))
    return found, drafted


def run_layer(model: MtpLayer, first: Tensor, tokens: list[int]) -> list[Tensor]:
    config, pages = model.config, [(3 * page + 1) % 5 for page in range(5)]
    memory = torch.zeros(5, block_bytes(config, "float32", BLOCK_TOKENS) // 4)
    pool = paged_pool(config, memory, BLOCK_TOKENS)
    state, found, ids = model.fuse(first[:, None]), list[Tensor](), TOKENS[1:]
    for step in range(STEPS + 1):
        start = 0 if step == 0 else PROMPT + step - 1
        places = torch.arange(start, start + len(ids))
        slots = torch.tensor(pages)[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
        batch = PagedBatch(pool, config.num_heads, [0, len(ids)], [start + len(ids)], [pages])
        found.append(model.forward(state, DraftRows(ids, places + 1, slots[None]), [batch]))
        state, ids = found[-1][-1:], torch.tensor(tokens[step : step + 1])
    return found


@pytest.mark.parametrize("name", ["deepseek", "glm4-moe"])
def test_layer_gives_the_states_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    with torch.inference_mode():
        oracle = make_oracle(tiny)
        weights = tiny.weights | as_stored(oracle, tiny.config.num_layers)
        target = DraftTarget.of(Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu")))
        model = MtpLayer(mtp_config_of(tiny.config, weights), weights, target)
        first = tiny.oracle.model(TOKENS[None, :-1]).last_hidden_state[0]
        expected, tokens = expected_states(oracle, first)
        found = run_layer(model, first, tokens)
        logits, expected_logits = model.logits(found[-1]), oracle.shared_head(expected[-1])
    assert model.boundaries == (FINAL,)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("min_expanded_rows", [1, 100])
@pytest.mark.parametrize("first", [1, 4, 6])
@pytest.mark.parametrize("name", ["deepseek", "glm4-moe"])
def test_rows_ignore_slots_below_first(
    name: str,
    first: int,
    min_expanded_rows: int,
    family_of: Callable[[str], TinyFamily],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Latent, "min_expanded_rows", min_expanded_rows)
    tiny = family_of(name)
    ids, states = TOKENS[1 + first :], torch.randn(PROMPT - first, tiny.config.hidden_size)
    with torch.inference_mode():
        weights = tiny.weights | as_stored(make_oracle(tiny), tiny.config.num_layers)
        target = DraftTarget.of(Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu")))
        model = MtpLayer(mtp_config_of(tiny.config, weights), weights, target)
        found = []
        # The rows stand behind `first` slots that hold other numbers, and then at the front of a table.
        for hidden in (first, 0):
            memory = torch.full((3, block_bytes(model.config, "float32", BLOCK_TOKENS) // 4), 5.0)
            memory[: hidden // BLOCK_TOKENS] = float("nan")
            pool, places = paged_pool(model.config, memory, BLOCK_TOKENS), torch.arange(len(ids)) + hidden
            context = hidden + len(ids)
            batch = PagedBatch(pool, model.config.num_heads, [0, len(ids)], [context], [range(3)], first=[hidden])
            positions = torch.arange(len(ids)) + first + 1
            found.append(model.forward(states, DraftRows(ids, positions, places[None]), [batch]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_checkpoint_without_the_layer_is_refused(family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of("deepseek")
    with pytest.raises(BadCheckpoint, match=r"model.layers.3.eh_proj.weight is missing: the checkpoint has no layer"):
        mtp_config_of(tiny.config, tiny.weights)
