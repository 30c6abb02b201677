"""All layers of a dense decoder in one native call, for the few rows of a decode step on a CPU.

It removes the time between kernels, as CUDA graphs do on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.linear import PackedWeight
from weft_kernels.linear.packed12 import Packed12
from weft_kernels.native import FLOAT, LONG, POINTER
from weft_kernels.native.row_kernels import SUFFIXES
from weft_kernels.paged_attention import KeySpan, PagedBatch
from weft_kernels.paged_attention.cpu import cpu_batch

_WEIGHTS = ("input_norm", "qkv", "bias", "q_norm", "k_norm", "output", "mlp_norm", "gate_up", "down")


class _Layer(ctypes.Structure):
    """Memory layout of `Layer` in fused_decoder.cpp; the other structures follow the same file."""

    _fields_ = (
        *((name, POINTER) for name in _WEIGHTS),
        *((name, LONG) for name in ("view", "group", "place", "is_rotated")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, LONG) for name in ("num_layers", "hidden", "num_heads", "kv_heads", "dim", "size")),
        ("eps", FLOAT),
        ("scale", FLOAT),
        ("layers", POINTER),
        ("norm", POINTER),
    )


class _View(ctypes.Structure):
    _fields_ = (("blocks", POINTER), ("spans", POINTER))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, LONG) for name in ("num_rows", "num_views", "pool_layers", "block_tokens")),
        *((name, POINTER) for name in ("views", "stream", "out", "pool", "cos", "sin", "slots")),
    )


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Tensors of one layer: norm, biased qkv, head norms, rotation, attention, output; norm, gate and up, down.

    Missing biases and head norms are None. Keys and values go to the pool of batch `group`, as its layer `place`.
    """

    input_norm: Tensor
    qkv: PackedWeight
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    group: int
    place: int
    span: KeySpan
    is_rotated: bool

    @property
    def linears(self) -> tuple[PackedWeight, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def pointers(self) -> list[int | None]:
        """Return the addresses of the weights in the order of `_WEIGHTS`."""
        tensors = (getattr(self, name) for name in _WEIGHTS)
        matrices = (each.data if isinstance(each, PackedWeight) else each for each in tensors)
        return [each.data_ptr() if isinstance(each, Tensor | Packed12) else None for each in matrices]


class FusedDecoder:
    """Layers in the layout of the native kernel, see `fuse_layers`. Keeps their tensors alive."""

    def __init__(
        self, function: Callable[..., None], layers: Sequence[FusedLayer], norm: Tensor, num_heads: int, eps: float
    ) -> None:
        first = layers[0]
        self._function, self._tensors = function, (layers, norm)
        hidden, dim = first.qkv.num_inputs, first.output.num_inputs // num_heads
        kv_heads = (first.qkv.num_outputs // dim - num_heads) // 2
        self._views = list(dict.fromkeys((layer.group, layer.span) for layer in layers))
        self._layers = (_Layer * len(layers))(*(self._described(layer) for layer in layers))
        sizes = len(layers), hidden, num_heads, kv_heads, dim, first.down.num_inputs
        self._model = _Model(*sizes, eps, dim**-0.5, ctypes.addressof(self._layers), norm.data_ptr())
        self._dtype = norm.dtype

    def forward(
        self, stream: Tensor, angles: tuple[Tensor, Tensor], slots: Tensor, batches: Sequence[PagedBatch]
    ) -> Tensor | None:
        """Return normed hidden states [T, hidden], and write the KV of all rows.

        stream: embeddings [T, hidden], overwritten. angles: cosine and sine [T, dim]. slots: [groups, T] int64.
        batches: one per group, all of one pool. Returns None, and does nothing, if a sequence has so many rows that
        a prefill chunk is faster.
        """
        rows = [cpu_batch(batches[group], span, is_whole=True) for group, span in self._views]
        if not len(stream) or any(each.chunks for each in rows):
            return None
        pool, slots, out = batches[0].pool, slots.contiguous(), torch.empty_like(stream)
        assert stream.dtype == pool.dtype == angles[0].dtype == self._dtype
        assert all(each.is_contiguous() for each in (stream, *angles))
        views = (_View * len(rows))(*(_View(each.blocks.data_ptr(), each.spans.data_ptr()) for each in rows))
        tensors = (each.data_ptr() for each in (stream, out, pool, *angles, slots))
        step = _Step(len(stream), len(rows), pool.shape[2], pool.shape[4], ctypes.addressof(views), *tensors)
        self._function(ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads())
        return out

    def _described(self, layer: FusedLayer) -> _Layer:
        view = self._views.index((layer.group, layer.span))
        return _Layer(*layer.pointers, view, layer.group, layer.place, layer.is_rotated)


def fuse_layers(layers: Sequence[FusedLayer | None], norm: Tensor, num_heads: int, eps: float) -> FusedDecoder | None:
    """Fuse `layers` and the final `norm`; None if the machine or one of the layers does not suit the kernel.

    The results equal those of `rms_norm`, `linear`, `rope_kv`, `paged_attention` and `silu_mul` to the last bit.
    """
    known = [layer for layer in layers if layer is not None]
    forms = {(each.dtype, each.library, _name(each)) for layer in known for each in layer.linears}
    if len(known) < len(layers) or len(forms) != 1:
        return None
    dtype, library, weights = forms.pop()
    if library is None or weights is None or dtype != norm.dtype:
        return None
    first, width = known[0], library.weft_width()
    dim = first.output.num_inputs // num_heads
    if any(size % width for size in (first.qkv.num_inputs, first.down.num_inputs, dim // 2)):
        return None
    function = getattr(library, f"weft_fused_decoder_{SUFFIXES[dtype]}_{weights}")
    return FusedDecoder(function, known, norm, num_heads, eps)


def _name(weight: PackedWeight) -> str | None:
    """Return the kernel's name for the storage of this weight."""
    if isinstance(weight.data, Packed12):
        return "packed12"
    return SUFFIXES[weight.data.dtype] if isinstance(weight.data, Tensor) else None
