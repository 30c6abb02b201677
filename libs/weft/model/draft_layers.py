"""What the layer ids of a draft head mean. Its file names them in one of several ways, and a wrong one runs silently.

A boundary is a place in the target's residual stream: b is before layer b, the number of layers is behind the last one,
and FINAL is that state normed. No torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

from weft.errors import ConfigError
from weft.model.kv_layout import kv_groups
from weft.model.spec import FINAL, LayerSpec, ModelConfig

Boundaries = tuple[int, ...]


class Producer(StrEnum):
    """The program or project that wrote a head."""

    SAFEAI = "SafeAI"
    SPECFORGE = "SpecForge"
    SPECULATORS = "speculators"
    MODELOPT = "ModelOpt"
    KIMI = "Kimi"


# Their ids name layers and mean the state behind each; the ids of the others are boundaries.
NAMES_OUTPUTS = (Producer.SPECFORGE, Producer.MODELOPT)


def original_boundaries(num_layers: int) -> Boundaries:
    """Return the boundaries of the EAGLE-3 paper's code, which a file without ids means."""
    return 2, num_layers // 2, num_layers - 3


def default_reading(producer: Producer, layer_ids: Boundaries, num_layers: int, is_final: bool) -> Boundaries:
    """Return the most likely boundaries of a head.

    Ids that give the original boundaries in one of the two ways mean these for every producer. The number of layers
    is no index of a layer, so ids that contain it are boundaries. `is_final`: the file names the normed state alone.
    """
    if is_final:
        return (FINAL,)
    original, outputs = original_boundaries(num_layers), tuple(each + 1 for each in layer_ids)
    if not layer_ids or original in (layer_ids, outputs):
        return original
    is_output = producer in NAMES_OUTPUTS and max(outputs) <= num_layers
    return outputs if is_output else layer_ids


def readings(layer_ids: Boundaries, boundaries: Boundaries, num_layers: int) -> dict[str, Boundaries]:
    """Return all possible meanings of a head's ids by name, the most likely one first and each one once.

    boundaries: the default reading, which says how many states make up a feature.
    """
    candidates = {
        "chosen": boundaries,
        "ids": layer_ids,
        "ids + 1": tuple(each + 1 for each in layer_ids),
        "original": original_boundaries(num_layers),
        "final": (FINAL,),
        "last": (num_layers,),
    }
    found: dict[str, Boundaries] = {}
    for name, each in candidates.items():
        if len(each) == len(boundaries) and max(each) <= num_layers and each not in found.values():
            found[name] = each
    return found


def parse_boundaries(text: str, num_features: int, num_layers: int) -> Boundaries:
    """Read `--draft-layers`: boundaries 0 to `num_layers` with commas, or final. Raises ConfigError."""
    parts = [each.strip() for each in text.split(",")]
    known = {"final": FINAL} | {str(each): each for each in range(num_layers + 1)}
    if len(parts) != num_features or not set(parts) <= known.keys():
        what = f"expected {num_features} boundaries from 0 to {num_layers} with commas, or final; found {text!r}"
        raise ConfigError(f"--draft-layers: {what}")
    return tuple(known[each] for each in parts)


def draft_layer(target: ModelConfig) -> LayerSpec:
    """Return how far back the layer of a draft model looks: as far as any layer of the target.

    A target that has no layer without a window keeps nothing older, so the draft layer joins its widest group.
    """
    spans = [LayerSpec(window=layer.window, chunk=layer.chunk) for layer in target.layers]
    return max(spans, key=lambda layer: layer.window or layer.chunk or math.inf)


def with_draft(target: ModelConfig, draft: ModelConfig) -> ModelConfig:
    """Return the target's config with the KV of a draft model's layer, which lies in the target's pages."""
    layer = draft.layers[0]
    return replace(target, drafts=(replace(layer, planes=draft.planes_of(layer)),))


def draft_place(config: ModelConfig) -> tuple[int, int]:
    """Return group and number in the pool of the draft model's layer of such a config."""
    return kv_groups(config).group_of[-1], config.num_layers
