"""Loads a worker's draft model: reads its config, and finds out which states of the target it reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.file_io import path_exists, read_json_object, read_small
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel, DraftTarget
from weft.model.draft_config import DraftConfig, draft_config_of
from weft.model.draft_layers import Boundaries, draft_place, parse_boundaries, readings
from weft.model.draft_scoring import ReadingScore, answer, best_reading, score_readings
from weft.model.eagle import EagleHead
from weft.model.fields import Fields
from weft.model.loading import DTYPE_NAMES
from weft.model.mtp import MtpLayer
from weft.model.mtp_config import MtpConfig, has_mtp_layer, mtp_config_of
from weft.model.spec import ModelConfig
from weft.tokenizer import SETTINGS, read_special_tokens, read_tokenizer

logger = logging.getLogger(__name__)
# Readings are compared on the target's answers to these. Every worker has the same ones, so that all choose the same
# reading.
QUESTIONS = (
    "Tell me a story.",
    "What can you do?",
    "Write a poem about a river.",
    "Write a Python function that sorts a list, and explain each line.",
)
ANSWER_TOKENS = 64
# Changes whenever other draft KV follows from the same weights.
DRAFT_KV = "draft-1"


@dataclass(frozen=True, slots=True)
class DraftImage:
    """A draft model as the weights service holds it: an EAGLE-3 head, or the layer of the target's own checkpoint."""

    config: DraftConfig | MtpConfig
    tensors: Mapping[str, Tensor]
    weights_hash: str

    @property
    def layer(self) -> ModelConfig:
        return self.config.layer


def read_draft_image(
    config_json: str, tensors: Mapping[str, Tensor], weights_hash: str, target: ModelConfig
) -> DraftImage:
    """Return the draft model that these tensors are; `config_json` is its config. Raises BadCheckpoint."""
    if has_mtp_layer(target, tensors):
        return DraftImage(mtp_config_of(target, tensors.keys()), tensors, weights_hash)
    stored = {name: (DTYPE_NAMES.get(each.dtype, ""), tuple(each.shape)) for name, each in tensors.items()}
    fields = Fields(Path("draft/config.json"), json.loads(config_json))
    return DraftImage(draft_config_of(fields, stored, target), tensors, weights_hash)


def load_draft(
    image: DraftImage, target: Decoder, is_resident: bool, layers: str, prompts: Callable[[], Sequence[Sequence[int]]]
) -> DraftModel:
    """Build the draft model, and settle its boundaries. The target's config must have its layer, see `with_draft`.

    - `layers`: the boundaries as WEFT_DRAFT_LAYERS names them; empty: as the files say. If these leave it open, the
      boundaries are those with which the head agrees best with the target's answers to `prompts`.

    Raises BadCheckpoint for a head of another model, ConfigError for wrong `layers`.
    """
    made_for, place = DraftTarget.of(target, is_resident), draft_place(target.config)
    config, num_layers = image.config, target.config.num_layers
    if isinstance(config, MtpConfig):
        model: EagleHead | MtpLayer = MtpLayer(config, image.tensors, made_for, place)
    else:
        model = EagleHead(config, image.tensors, made_for, place)
    if layers:
        model.boundaries = parse_boundaries(layers, len(model.boundaries), num_layers)
    elif isinstance(model, EagleHead) and not model.draft.names_boundaries:
        model.boundaries = _best_boundaries(model, target, prompts())
    logger.info("draft model loaded architecture=%s boundaries=%s", model.config.architecture, list(model.boundaries))
    return model


def drafted_hash(target_hash: str, draft_hash: str, boundaries: Boundaries) -> str:
    """Return the hash that stands for target and draft model: pages hold the KV of both."""
    parts = DRAFT_KV, target_hash, draft_hash, *map(str, boundaries)
    return blake2b("\0".join(parts).encode(), digest_size=32).hexdigest()


def scoring_prompts(model: Path | None) -> list[list[int]]:
    """Return QUESTIONS as the model's chats have them, or as plain text if the model has no chat template.

    Raises BadCheckpoint without a tokenizer, StorageUnavailable.
    """
    if model is None:
        what = "a tokenizer is needed to find the layers that the draft head reads"
        raise BadCheckpoint(f"WEFT_MODEL: {what}; set it, or WEFT_DRAFT_LAYERS")
    tokenizer = Tokenizer.from_str(read_tokenizer(model).decode())
    chats = _as_chats(model)
    return [each.ids for each in tokenizer.encode_batch(chats or list(QUESTIONS), add_special_tokens=not chats)]


def _best_boundaries(head: EagleHead, target: Decoder, prompts: Sequence[Sequence[int]]) -> Boundaries:
    draft = head.draft
    candidates = readings(draft.layer_ids, draft.boundaries, target.config.num_layers)
    boundaries = {each for reading in candidates.values() for each in reading}
    scores = score_readings(head, answer(target, prompts, boundaries, ANSWER_TOKENS), candidates)
    logger.info("readings of the draft head scored %s", " ".join(map(_described, scores)))
    return best_reading(scores, "draft head").boundaries


def _described(score: ReadingScore) -> str:
    name = score.name.replace(" ", "")
    return f"{name}={','.join(map(str, score.boundaries))}:{score.agreement:.2f}"


def _as_chats(model: Path) -> list[str]:
    """Return the questions in the model's chat format; empty if there is none or it cannot be rendered.

    Any text serves, so a template that needs more than messages is no error.
    """
    if not (source := _template(model)):
        return []
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        template = environment.from_string(source)
        tokens, chats = read_special_tokens(model), [[{"role": "user", "content": each}] for each in QUESTIONS]
        return [template.render(messages=chat, add_generation_prompt=True, **tokens) for chat in chats]
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        logger.info("chat template not rendered, readings are scored on plain text error=%s", error)
        return []


def _template(model: Path) -> str:
    if path_exists(path := model / "chat_template.jinja"):
        return read_small(path).decode()
    settings = read_json_object(model / SETTINGS) if path_exists(model / SETTINGS) else {}
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), "")
    return found if isinstance(found, str) else ""
