"""Sizes of a model's tensors, by layer and by how GPUs divide them. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from weft.model.spec import ModelConfig
from weft.model.tensors import FLOATS, INT4_PER_WORD, expected_tensors, stored_dtypes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# 12 bits of 16, and escapes: the size that matrices with the published statistics stay below
F12_SHARE = 0.755


class TensorKind(StrEnum):
    """How the GPUs of a stage divide a tensor."""

    EMBEDDING = "embedding"  # divided by TP
    HEAD = "head"  # divided by TP
    ATTENTION = "attention"  # divided by TP: by query heads
    KEYS_VALUES = "keys and values"  # divided by TP as far as there are key heads
    MLP = "dense MLP"  # divided by TP
    EXPERTS = "experts"  # divided over all GPUs of a stage
    WHOLE = "norms, routers, latents"  # on every GPU


@dataclass(slots=True)
class Weight:
    """`size_bytes` as stored or held; `params` as computed with: eight to a packed word, none for scales."""

    size_bytes: int = 0
    params: int = 0


# A layer's number, or one of these two.
FIRST, LAST = -1, -2
Footprint = Mapping[tuple[int, TensorKind], Weight]

# by safetensors' names
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# modules that the engine makes one matrix of, by the names that they have in attention, MLPs and Mixtral's experts
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_MATRICES, _PACKED = (".weight", ".weight_packed"), (".weight_packed", ".weight_scale_inv")
_FACTORS = (".weight_scale", ".weight_scale_inv", ".weight_shape")
_ROUTING_BIASES = ("e_score_correction_bias", "expert_bias")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PATTERNS = (
    (TensorKind.EXPERTS, re.compile(r"\.experts\.")),
    (TensorKind.EMBEDDING, re.compile(r"embed_tokens\.")),
    (TensorKind.HEAD, re.compile(r"lm_head\.")),
    (TensorKind.KEYS_VALUES, re.compile(r"\.[kv]_proj\.")),
    (TensorKind.ATTENTION, re.compile(r"\.(q_proj|qkv_proj|o_proj|q_b_proj|kv_b_proj)\.")),
    (TensorKind.MLP, re.compile(r"\.(gate_proj|up_proj|gate_up_proj|down_proj)\.")),
    (TensorKind.WHOLE, re.compile("")),
)


@lru_cache(maxsize=16)
def footprint(config: ModelConfig, dtype: str = "", is_resident: bool = False) -> Footprint:
    """The text model's tensors as the checkpoint stores them; with `dtype`, as a GPU holds them that computes in it.

    With `is_resident`, bfloat16 matrices as F12, should it suit them all.
    """
    shapes = expected_tensors(config)
    found: defaultdict[tuple[int, TensorKind], Weight] = defaultdict(Weight)
    for name, shape in shapes.items():
        kind = next(kind for kind, pattern in _PATTERNS if pattern.search(name))
        layer = _LAYER.search(name)
        place = int(layer[1]) if layer else FIRST if kind is TensorKind.EMBEDDING else LAST
        weight = found[place, kind]
        stored = stored_dtypes(name, shapes)
        num_items = math.prod(shape)
        params = 0 if name.endswith(_FACTORS) else num_items * (INT4_PER_WORD if stored == ("I32",) else 1)
        weight.params += params
        if not dtype:
            weight.size_bytes += num_items * _item_bytes(name, stored, ITEM_BYTES[config.dtype])
            continue
        is_plain = _is_unpacked(name, shapes) or (stored == FLOATS and not name.endswith(_FACTORS))
        if is_plain:
            size_bytes = params * _wide_bytes(name, config, dtype)
        else:
            size_bytes = 0 if name.endswith(".weight_shape") else num_items * _item_bytes(name, stored, 0)
        is_packed = is_resident and dtype == "bfloat16" and is_plain and _is_multiplied(name, shape, config)
        weight.size_bytes += math.ceil(size_bytes * F12_SHARE) if is_packed else size_bytes
    return found


@lru_cache(maxsize=16)
def cpu_bytes(config: ModelConfig, dtype: str) -> int:
    """What a CPU holds that computes in it, without the padding of its panels: see `weft_kernels.linear.pack`.

    All is unpacked. bfloat16 matrices stay what they are, but where they are one with packed ones. Panels are another
    memory than the table of embeddings that a tied head is.
    """
    shapes, total = expected_tensors(config), 0
    for name, shape in expected_tensors(replace(config, quantization=None)).items():
        is_kept = config.dtype == "bfloat16" and name in shapes and stored_dtypes(name, shapes) == FLOATS
        is_kept = is_kept and _is_multiplied(name, shape, config) and not _is_unpacked(name, shapes)
        size_bytes = math.prod(shape) * (ITEM_BYTES["bfloat16"] if is_kept else _wide_bytes(name, config, dtype))
        total += size_bytes * (2 if config.is_tied and "embed_tokens." in name else 1)
    return total


def with_stored_dtype(config: ModelConfig, tensors: Iterable[tuple[str, int]]) -> ModelConfig:
    """Return the config with the dtype that most bytes of plain tensors have, which config.json may misstate.

    `tensors` are pairs of a safetensors dtype name and a size in bytes.
    """
    found: Counter[str] = Counter()
    for name, size_bytes in tensors:
        found[name] += size_bytes
    plain = {DTYPES[name]: found[name] for name in FLOATS if found[name]}
    return replace(config, dtype=max(plain, key=lambda name: plain[name])) if plain else config


def _is_unpacked(name: str, shapes: Container[str]) -> bool:
    """Return True if a linear weight must be plain on a GPU, because its matrix also has unpacked parts."""
    if _is_taken_apart(name):
        return True
    root, _, part = name.rpartition(".")[0].rpartition(".")
    parts = next((each for each in TOGETHER if part in each), ())
    there = [f"{root}.{each}" for each in parts if any(f"{root}.{each}{end}" in shapes for end in _MATRICES)]
    packed = [each for each in there if any(each + end in shapes for end in _PACKED)]
    return 0 < len(packed) < len(there)


def _wide_bytes(name: str, config: ModelConfig, dtype: str) -> int:
    """Return the bytes of one number of a plain tensor."""
    is_wide = config.experts is not None and config.experts.has_bias and _is_router(name, config)
    is_wide = is_wide or (config.norm_offset != 0 and name.endswith("norm.weight"))
    return 4 if is_wide or name.endswith(_ROUTING_BIASES) else ITEM_BYTES[dtype]


def _is_multiplied(name: str, shape: tuple[int, ...], config: ModelConfig) -> bool:
    """Return True for a plain matrix that linear layers multiply, and that can stay packed."""
    is_matrix = len(shape) > 1 and not name.endswith((*_FACTORS, *_ROUTING_BIASES))
    return is_matrix and not _is_router(name, config) and not _is_taken_apart(name)


def _is_router(name: str, config: ModelConfig) -> bool:
    return config.experts is not None and name.endswith(f".{config.mlp_name}.{config.experts.router}.weight")


def _is_taken_apart(name: str) -> bool:
    """Return True for the matrix that latent attention splits into two plain halves."""
    return ".kv_b_proj." in name


def _item_bytes(name: str, stored: tuple[str, ...], plain: int) -> int:
    if stored == ("I32",) or name.endswith((".weight_scale_inv", *_ROUTING_BIASES)):
        return 4
    if stored == ("F8_E4M3",):
        return 1
    return 8 if name.endswith(".weight_shape") else 2 if name.endswith(".weight_scale") else plain
