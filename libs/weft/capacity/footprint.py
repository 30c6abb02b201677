"""Sizes of a model's tensors, by layer and by how GPUs divide them. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from weft.model.quantization import FLOATS, is_packed, part_of
from weft.model.spec import ModelConfig
from weft.model.tensors import model_tensors

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
_ROUTING_BIASES = ("e_score_correction_bias", "expert_bias")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PATTERNS = (
    (TensorKind.EXPERTS, re.compile(r"\.experts\.")),
    (TensorKind.EMBEDDING, re.compile(r"embed_tokens\.")),
    (TensorKind.HEAD, re.compile(r"lm_head\.")),
    (TensorKind.KEYS_VALUES, re.compile(r"\.[kv]_proj\.")),
    (TensorKind.ATTENTION, re.compile(r"\.(q_proj|qkv_proj|o_proj|g_proj|q_b_proj|kv_b_proj)\.|attn\.gate_proj\.")),
    (TensorKind.MLP, re.compile(r"\.(gate_proj|up_proj|gate_up_proj|down_proj)\.")),
    (TensorKind.WHOLE, re.compile("")),
)


@lru_cache(maxsize=16)
def footprint(config: ModelConfig, dtype: str = "", is_resident: bool = False) -> Footprint:
    """The text model's tensors as the checkpoint stores them; with `dtype`, as a GPU holds them that computes in it.

    With `is_resident`, bfloat16 matrices as F12, should it suit them all.
    """
    shapes, how = model_tensors(config), config.quantization
    found: defaultdict[tuple[int, TensorKind], Weight] = defaultdict(Weight)
    for name, shape in shapes.items():
        kind = next(kind for kind, pattern in _PATTERNS if pattern.search(name))
        layer = _LAYER.search(name)
        place = int(layer[1]) if layer else FIRST if kind is TensorKind.EMBEDDING else LAST
        weight = found[place, kind]
        part, num_items = part_of(name, shapes, how), abs(math.prod(shape))  # ANY_LENGTH is -1: one item
        params = num_items * (part.num_values if part else 1)
        weight.params += params
        if not dtype:
            plain = 4 if name.endswith(_ROUTING_BIASES) else ITEM_BYTES[config.dtype]
            weight.size_bytes += num_items * (part.stored_bytes if part else plain)
            continue
        is_plain = part is None or _is_unpacked(name, config, shapes)
        size_bytes = params * _wide_bytes(name, config, dtype)
        if part is not None and not is_plain:
            size_bytes = num_items * part.held_bytes
        is_f12 = is_resident and dtype == "bfloat16" and is_plain and _is_multiplied(name, shape, config)
        weight.size_bytes += math.ceil(size_bytes * F12_SHARE) if is_f12 else size_bytes
    return found


@lru_cache(maxsize=16)
def cpu_bytes(config: ModelConfig, dtype: str) -> int:
    """What a CPU holds that computes in it, without the padding of its panels: see `weft_kernels.linear.pack`.

    All is unpacked. bfloat16 matrices stay what they are, but where they are one with packed ones. MXFP4 experts become
    bfloat16. Panels are another memory than the table of embeddings that a tied head is.
    """
    shapes, how, total = model_tensors(config), config.quantization, 0
    for name, shape in model_tensors(replace(config, quantization=None)).items():
        is_kept = config.dtype == "bfloat16" and name in shapes and part_of(name, shapes, config.quantization) is None
        is_kept = is_kept and _is_multiplied(name, shape, config) and not _is_unpacked(name, config, shapes)
        is_kept = is_kept or (how is not None and how.is_of_experts and is_packed(name, shapes, how))
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


def _is_unpacked(name: str, config: ModelConfig, shapes: Container[str]) -> bool:
    """Return True if a linear weight must be plain on a GPU: its format or a part of its matrix is."""
    how = config.quantization
    if _is_taken_apart(name) or (how is not None and how.is_expanded and part_of(name, shapes, how)):
        return True
    root, _, part = name.rpartition(".")[0].rpartition(".")
    parts = next((each for each in TOGETHER if part in each), ())
    packed = [each for each in parts if is_packed(f"{root}.{each}", shapes, how)]
    plain = [each for each in parts if each not in packed and f"{root}.{each}.weight" in shapes]
    return bool(packed and plain)


def _wide_bytes(name: str, config: ModelConfig, dtype: str) -> int:
    """Return the bytes of one number of a plain tensor."""
    is_wide = config.experts is not None and config.experts.has_bias and _is_router(name, config)
    is_wide = is_wide or name.endswith(".sinks")
    is_wide = is_wide or (config.norm_offset != 0 and name.endswith(("norm.weight", "norm.bias")))
    return 4 if is_wide or name.endswith(_ROUTING_BIASES) else ITEM_BYTES[dtype]


def _is_multiplied(name: str, shape: tuple[int, ...], config: ModelConfig) -> bool:
    """Return True for a plain matrix that linear layers multiply, and that can stay packed."""
    is_matrix = len(shape) > 1 and not name.endswith((*_ROUTING_BIASES, "_proj_bias"))
    return is_matrix and not _is_router(name, config) and not _is_taken_apart(name)


def _is_router(name: str, config: ModelConfig) -> bool:
    return config.experts is not None and name.endswith(f".{config.mlp_name}.{config.experts.router}.weight")


def _is_taken_apart(name: str) -> bool:
    """Return True for the matrix that latent attention splits into two plain halves."""
    return ".kv_b_proj." in name
