"""All layers of a dense decoder in one native call, for the few rows of a decode step on a CPU.

It removes the time between kernels, as CUDA graphs do on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft_kernels.collectives import Alone, Comm
from weft_kernels.linear import PackedWeight
from weft_kernels.linear.packed12 import Packed12
from weft_kernels.native import FLOAT, LONG, POINTER
from weft_kernels.native.row_kernels import SUFFIXES
from weft_kernels.paged_attention import KeySpan, PagedBatch
from weft_kernels.paged_attention.cpu import cpu_batch

_WEIGHTS = (
    *("input_norm", "qkv", "bias", "q_norm", "k_norm", "query_weight", "output", "output_bias", "attended_norm"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "output_norm"),
)
_PLACES = "view", "group", "rotation", "q_parts", "k_parts", "is_normed_last", "is_scaled"
_STEP_SIZES = "num_rows", "num_views", "has_float_angles", "num_captured"
_SIZES = "num_layers", "hidden", "num_heads", "kv_heads", "dim", "size", "is_gelu", "has_float_norms"


class _Layer(ctypes.Structure):
    """Memory layout of `Layer` in fused_decoder.cpp; the other structures follow the same file."""

    _fields_ = (*((name, POINTER) for name in _WEIGHTS), *((name, LONG) for name in _PLACES))


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, LONG) for name in _SIZES),
        *((name, FLOAT) for name in ("eps", "scale", "residual_scale")),
        *((name, POINTER) for name in ("layers", "norm", "group")),
    )


class _View(ctypes.Structure):
    _fields_ = (("blocks", POINTER), ("spans", POINTER))


class _Angles(ctypes.Structure):
    _fields_ = (("cos", POINTER), ("sin", POINTER))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, LONG) for name in _STEP_SIZES),
        *((name, POINTER) for name in ("views", "angles", "stream", "out", "pools", "slots", "query_factors")),
        *((name, POINTER) for name in ("boundaries", "captured")),
    )


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Tensors of one layer, in the order of their use. Missing biases and norms are None.

    - `q_norm`, `k_norm`: weights of one head, or of all heads that are normed together; with `is_normed_last` they
      apply behind the rotation.
    - `attended_norm`, `output_norm`: of what attention and MLP add to the residual stream.
    - `query_weight`: float32 factors of the numbers of each query, behind everything else.
    - Rows and blocks are those of batch `group`; keys and values are the pool's layer of the same index.
    - `rotation`: index among the angles of a step, None if heads are not rotated.
    - `is_scaled`: queries are multiplied by the factor of their row.
    """

    input_norm: Tensor | None
    qkv: PackedWeight
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    query_weight: Tensor | None
    output: PackedWeight
    output_bias: Tensor | None
    attended_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    output_norm: Tensor | None
    group: int
    span: KeySpan
    rotation: int | None
    is_normed_last: bool = False
    is_scaled: bool = False

    @property
    def linears(self) -> tuple[PackedWeight, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> list[Tensor]:
        norms = self.input_norm, self.q_norm, self.k_norm, self.attended_norm, self.mlp_norm, self.output_norm
        return [each for each in norms if each is not None]

    @property
    def pointers(self) -> list[int | None]:
        """Return the addresses of the weights in the order of `_WEIGHTS`."""
        tensors = (getattr(self, name) for name in _WEIGHTS)
        matrices = (each.data if isinstance(each, PackedWeight) else each for each in tensors)
        return [each.data_ptr() if isinstance(each, Tensor | Packed12) else None for each in matrices]


@dataclass(frozen=True, slots=True)
class LayerRules:
    """What all layers have in common.

    - `attention_scale`: factor of the scores, None for dim ** -0.5.
    - `residual_scale`: factor of what attention and MLP add to the residual stream.
    - `is_gelu`: gates are GELU with the tanh approximation instead of SiLU.
    - `comm`: connects the ranks that share each layer.
    """

    num_heads: int
    eps: float
    attention_scale: float | None = None
    residual_scale: float = 1.0
    is_gelu: bool = False
    comm: Comm = field(default_factory=Alone)


class FusedDecoder:
    """Layers in the layout of the native kernel, see `fuse_layers`. Keeps their tensors alive."""

    def __init__(
        self, function: Callable[..., None], layers: Sequence[FusedLayer], norm: Tensor, rules: LayerRules
    ) -> None:
        first = layers[0]
        self._function, self._tensors = function, (layers, norm)
        self._comm, self._group = rules.comm, rules.comm.native
        self._dtype = first.qkv.dtype
        self._views = list(dict.fromkeys((layer.group, layer.span) for layer in layers))
        hidden, self._dim = first.qkv.num_inputs, first.output.num_inputs // rules.num_heads
        self._heads = rules.num_heads, (first.qkv.num_outputs // self._dim - rules.num_heads) // 2
        self._layers = (_Layer * len(layers))(*(self._described(layer) for layer in layers))
        sizes = len(layers), hidden, *self._heads, self._dim, first.down.num_inputs
        flags = rules.is_gelu, norm.dtype != self._dtype
        factors = rules.eps, rules.attention_scale or self._dim**-0.5, rules.residual_scale
        group = None if self._group is None else ctypes.addressof(self._group)
        self._model = _Model(*sizes, *flags, *factors, ctypes.addressof(self._layers), norm.data_ptr(), group)

    def forward(
        self,
        stream: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        query_factors: Tensor | None,
        slots: Tensor,
        batches: Sequence[PagedBatch],
        captured: tuple[Sequence[int], Tensor] | None = None,
    ) -> Tensor | None:
        """Return normed hidden states [T, hidden], and write the KV of all rows.

        - stream: embeddings [T, hidden], overwritten.
        - angles: cosine and sine [T, dim] of each rotation, all of stream's dtype or all float32.
        - query_factors: [T, 1, 1] float32, for layers that are scaled.
        - slots: [groups, T] int64. batches: one per group, all of one pool.
        - captured: boundaries, and memory [T, boundaries, hidden] for copies of the residual stream there. Boundary b
          is before layer b, the number of layers behind the last one; -1 is the result.

        Returns None, and does nothing, if a prompt has so many rows that a prefill chunk is faster, or if the heads of
        one row are so many.
        """
        ratio = self._heads[0] // self._heads[1]
        rows = [cpu_batch(batches[group], span, ratio, is_whole=True) for group, span in self._views]
        if not len(stream) or any(each.chunks for each in rows):
            return None
        pool, slots, out = batches[0].pool, slots.contiguous(), torch.empty_like(stream)
        angle_dtype = angles[0][0].dtype
        assert stream.dtype == pool.dtype == self._dtype
        assert angle_dtype in (self._dtype, torch.float32)
        assert all(each.is_contiguous() and each.dtype == angle_dtype for pair in angles for each in pair)
        assert stream.is_contiguous()
        views = (_View * len(rows))(*(_View(each.blocks.data_ptr(), each.spans.data_ptr()) for each in rows))
        rotations = (_Angles * len(angles))(*(_Angles(cos.data_ptr(), sin.data_ptr()) for cos, sin in angles))
        wanted, copies = captured or ((), out)
        boundaries = (LONG * len(wanted))(*wanted)
        assert captured is None or (copies.is_contiguous() and copies.dtype == self._dtype)
        sizes = len(stream), len(rows), angle_dtype != self._dtype, len(wanted)
        places = stream.data_ptr(), out.data_ptr(), ctypes.addressof(pool.native), slots.data_ptr()
        factors = None if query_factors is None else query_factors.data_ptr()
        step = _Step(
            *sizes,
            ctypes.addressof(views),
            ctypes.addressof(rotations),
            *places,
            factors,
            ctypes.addressof(boundaries),
            copies.data_ptr(),
        )
        self._function(ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads())
        self._comm.check()
        return out

    def _described(self, layer: FusedLayer) -> _Layer:
        view = self._views.index((layer.group, layer.span))
        norms = zip(self._heads, (layer.q_norm, layer.k_norm), strict=True)
        parts = (0 if norm is None else heads * self._dim // len(norm) for heads, norm in norms)
        rotation = -1 if layer.rotation is None else layer.rotation
        flags = layer.is_normed_last, layer.is_scaled
        return _Layer(*layer.pointers, view, layer.group, rotation, *parts, *flags)


def fuse_layers(layers: Sequence[FusedLayer | None], norm: Tensor, rules: LayerRules) -> FusedDecoder | None:
    """Fuse `layers` and the final `norm`; None if the machine or one of the layers does not suit the kernel.

    All norms are of one dtype, that of the activations or float32. The results equal those of the single ops to the
    last bit: `rms_norm`, `linear`, `rope_kv`, `paged_attention` and `silu_mul` or `gelu_mul`. Ranks of a group must all
    fuse or none of them: the kernel sums with several threads.
    """
    known = [layer for layer in layers if layer is not None]
    forms = {(each.dtype, each.library, _name(each)) for layer in known for each in layer.linears}
    sizes = {(each.qkv.num_outputs, each.output.num_inputs, each.down.num_inputs) for each in known}
    if len(known) < len(layers) or len(forms) != 1 or len(sizes) != 1:
        return None
    dtype, library, weights = forms.pop()
    norm_dtypes = {norm.dtype} | {each.dtype for layer in known for each in layer.norms}
    if rules.comm.size > 1 and rules.comm.native is None:
        return None
    if library is None or weights is None or norm_dtypes not in ({dtype}, {torch.float32}):
        return None
    first, width = known[0], library.weft_width()
    dim = first.output.num_inputs // rules.num_heads
    if any(size % width for size in (first.qkv.num_inputs, first.down.num_inputs, dim // 2)):
        return None
    function = getattr(library, f"weft_fused_decoder_{SUFFIXES[dtype]}_{weights}")
    return FusedDecoder(function, known, norm, rules)


def _name(weight: PackedWeight) -> str | None:
    """Return the kernel's name for the storage of this weight."""
    if isinstance(weight.data, Packed12):
        return "packed12"
    return SUFFIXES[weight.data.dtype] if isinstance(weight.data, Tensor) else None
