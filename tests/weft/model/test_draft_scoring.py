"""The readings of a head's layer ids are scored on a target that says what each boundary must hold.

Layers 1 and 2 of the target each turn the direction of a token into that of the next one in a cycle, and the other four
do nothing. So boundaries 1, 2 and 3 hold three different tokens, and a head finds what it needs in one of them alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.weft.model.eagle.heads import TARGET
from weft.errors import BadCheckpoint
from weft.model.decoder import Decoder
from weft.model.draft import DraftTarget
from weft.model.draft_layers import readings
from weft.model.draft_scoring import ScoringText, answer, best_reading, score_readings
from weft.model.eagle import EagleHead
from weft.model.spec import FINAL, LayerSpec, ModelConfig
from weft.model.step import Capture, TokenBatch
from weft.model.tensors import expected_tensors
from weft.weights.draft_checkpoint import read_draft_checkpoint
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch

SIZE, LAYERS, NUM_TOKENS, PROMPT = 64, 6, 65, 9
RIGHT = 2  # the boundary at which the stream is one token ahead; the output is two ahead
CYCLE = torch.randperm(SIZE, generator=torch.Generator().manual_seed(9))
CONFIG = replace(TARGET, vocab_size=SIZE, intermediate_size=SIZE, layers=(LayerSpec(),) * LAYERS)


def step_matrix(count: int) -> Tensor:
    """[SIZE, SIZE]: maps the direction of a token to that of the token `count` places behind it in the cycle."""
    matrix, places = torch.zeros(SIZE, SIZE), torch.arange(SIZE)
    matrix[CYCLE[(places + count) % SIZE], CYCLE[places]] = 1
    return matrix


def make_target(config: ModelConfig = CONFIG) -> Decoder:
    weights = {name: torch.zeros(shape) for name, shape in expected_tensors(CONFIG).items()}
    weights |= {name: torch.ones(shape) for name, shape in expected_tensors(CONFIG).items() if "norm" in name}
    weights |= {"model.embed_tokens.weight": torch.eye(SIZE), "lm_head.weight": torch.eye(SIZE)}
    for layer, factor in ((1, 1.0), (2, 4.0)):
        mlp = f"model.layers.{layer}.mlp."
        weights |= {mlp + "gate_proj.weight": torch.eye(SIZE), mlp + "up_proj.weight": torch.eye(SIZE)}
        weights[mlp + "down_proj.weight"] = factor * step_matrix(1)
    return Decoder(config, weights, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def target() -> Decoder:
    return make_target()


@pytest.fixture(scope="module")
def text(target: Decoder) -> ScoringText:
    """A prompt of which the target predicts nothing, and its own answer, with the states at all boundaries."""
    ids, positions = CYCLE[2 * torch.arange(NUM_TOKENS) % SIZE], torch.arange(NUM_TOKENS)
    ids[: PROMPT - 1] = CYCLE[7 * torch.arange(PROMPT - 1) % SIZE]
    boundaries = (*range(LAYERS + 1), FINAL)
    states, pool = torch.empty(NUM_TOKENS, len(boundaries), SIZE), torch.zeros(1, 2, LAYERS, 2, NUM_TOKENS, 16)
    batch = PagedBatch(uniform_pool(pool), CONFIG.num_heads, [0, NUM_TOKENS], [NUM_TOKENS], [[0]])
    with torch.inference_mode():
        hidden = target.hidden(
            TokenBatch(ids, positions, positions[None], positions), [batch], Capture(boundaries, states)
        )
        choices = target.logits(hidden).argmax(-1)
    assert choices[PROMPT - 1 : -1].tolist() == ids[PROMPT:].tolist()
    assert not (choices[: PROMPT - 1] == ids[1:PROMPT]).any()
    return ScoringText(dict(zip(boundaries, states.unbind(1), strict=True)), ids, choices, answer_start=PROMPT)


def make_head(fusion: Tensor, directory: Path, target: Decoder, layer_ids: list[int]) -> EagleHead:
    """A head whose layer adds nothing, so that `fusion` [SIZE, SIZE] of its first feature alone decides."""
    sizes: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": SIZE, "vocab_size": SIZE}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    eagle = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    config = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
    shapes = {"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128), "o_proj": (64, 64)}
    tensors = {f"midlayer.self_attn.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"midlayer.mlp.{name}_proj.weight": torch.zeros(SIZE, SIZE) for name in ("gate", "up", "down")}
    names = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(SIZE) for name in names}
    tensors["fc.weight"] = torch.cat((fusion, torch.zeros(SIZE, 2 * SIZE)), dim=1)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    draft = read_draft_checkpoint(directory, CONFIG).config
    return EagleHead(draft, tensors, DraftTarget.of(target), place=(1, 2))


@pytest.mark.parametrize(("layer_ids", "right"), [([2, 4, 5], "ids"), ([1, 3, 4], "chosen")])
def test_reading_with_the_best_agreement_wins(
    layer_ids: list[int], right: str, tmp_path: Path, target: Decoder, text: ScoringText
) -> None:
    """SpecForge's ids name outputs of layers, which is right in the second case, and wrong in the first one."""
    head = make_head(step_matrix(3), tmp_path, target, layer_ids)
    scores = score_readings(head, [text], readings(head.draft.layer_ids, head.boundaries, LAYERS))
    best = best_reading(scores, "head")
    assert (best.name, best.boundaries[0]) == (right, RIGHT)
    assert best.agreement == 1.0
    others = [each.agreement for each in scores if each.boundaries[0] != RIGHT]
    assert others
    assert max(others) < 0.05


def test_head_of_another_model_is_refused(tmp_path: Path, target: Decoder, text: ScoringText) -> None:
    head = make_head(step_matrix(7), tmp_path, target, [2, 4, 5])
    scores = score_readings(head, [text], readings(head.draft.layer_ids, head.boundaries, LAYERS))
    message = r"head: agrees .* at most 0% of the tokens, expected 15% \(chosen \[3, 5, 6\] 0%, ids \[2, 4, 5\] 0%"
    with pytest.raises(BadCheckpoint, match=message):
        best_reading(scores, "head")


def test_answers_have_the_states_and_choices_of_one_pass(target: Decoder, text: ScoringText) -> None:
    """Two prompts of other lengths are answered at a time."""
    whole = text.token_ids.tolist()
    prompts = [whole[: PROMPT + 3], whole[:PROMPT]]
    longer, found = answer(target, prompts, text.states.keys(), NUM_TOKENS - PROMPT)
    assert (longer.answer_start, found.answer_start) == (PROMPT + 3, PROMPT)
    assert longer.token_ids[:NUM_TOKENS].tolist() == found.token_ids.tolist() == whole
    assert longer.choices[:NUM_TOKENS].tolist() == found.choices.tolist() == text.choices.tolist()
    for boundary, states in text.states.items():
        torch.testing.assert_close(found.states[boundary], states)
        torch.testing.assert_close(longer.states[boundary][:NUM_TOKENS], states)


@pytest.mark.parametrize(("place", "size"), [(20, 20), (0, SIZE // 2)])
def test_answer_ends_before_an_end_token(place: int, size: int, text: ScoringText) -> None:
    """An end in place of the first token would leave nothing to compare. The text repeats after half of the cycle."""
    whole = text.token_ids.tolist()
    ending = make_target(replace(CONFIG, eos_token_ids=(whole[PROMPT + place],)))
    (found,) = answer(ending, [whole[:PROMPT]], (RIGHT,), NUM_TOKENS - PROMPT)
    assert found.token_ids.tolist() == whole[: PROMPT + size]
    assert len(found.choices) == len(found.states[RIGHT]) == PROMPT + size
