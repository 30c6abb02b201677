"""Checkpoint tensors by name, checked against the config and brought to where they run.

Knows names, shapes and packings; knows no blocks of a model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.quantization import INT4_PER_WORD, stored_dtypes
from weft.model.spec import ModelConfig, Packing
from weft.model.tensors import expected_tensors, is_ignored
from weft_kernels.linear import PackedWeight, pack
from weft_kernels.packed import F12, Fp8, Int4, Matrix, Stored, as_f12, on_device, read_fp8, read_int4, stack

Tensors = Mapping[str, Tensor]
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
}


class Loader:
    """Hands out a model's tensors, each to the building block that asks for it by its whole name."""

    def __init__(
        self, config: ModelConfig, weights: Tensors, dtype: torch.dtype, device: torch.device, is_resident: bool = False
    ) -> None:
        """With `is_resident`, matrices take the form that `weft_kernels.packed.resident` gives them, or on a CPU
        `weft_kernels.linear.pack`.

        Raises BadCheckpoint when a tensor is missing, has another shape, or is not part of the model.
        """
        expected = expected_tensors(config)
        for name, shape in expected.items():
            if name not in weights:
                raise BadCheckpoint(f"tensor {name} is missing")
            if tuple(weights[name].shape) != shape:
                raise BadCheckpoint(f"tensor {name} has shape {list(weights[name].shape)}, expected {list(shape)}")
            if DTYPE_NAMES.get(weights[name].dtype) not in stored_dtypes(name, expected):
                raise BadCheckpoint(f"tensor {name} has dtype {weights[name].dtype}, which it cannot be stored in")
        for name in weights:
            if name not in expected and not is_ignored(name, config):
                raise BadCheckpoint(f"tensor {name} is not part of a {config.architecture}")
        self._weights = weights
        self._config = config
        self._unread = set(expected)
        self.dtype = dtype
        self.device = device
        self.is_resident = is_resident
        self.packed: list[F12 | Fp8 | Int4] = []  # what linear layers multiply

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor as it is, in the dtype that the model runs in, or in another."""
        self._unread.discard(name)
        return self._weights[name].to(device=self.device, dtype=dtype or self.dtype)

    def matrix(self, name: str) -> Tensor:
        """A tensor to be packed or looked up in, before it is brought to the model's dtype.

        bfloat16 stays what it is on a CPU, where the kernels widen it as they read it; so does a table of embeddings.
        """
        is_kept = self.device.type == "cpu" and self._weights[name].dtype == torch.bfloat16
        return self.tensor(name, torch.bfloat16 if is_kept else None)

    def table(self, name: str) -> Tensor | F12:
        """A matrix to look rows up in, in the form in which it stays."""
        return as_f12(self.matrix(name)) if self.is_resident else self.matrix(name)

    def linear(self, *names: str, order: Tensor | None = None) -> PackedWeight:
        """Linear modules as one, their outputs one after the other, or in another `order`."""
        whole = stack([self.stored_weight(name) for name in names], order, self.dtype)
        return self.pack(on_device(whole, self.dtype, self.is_resident))

    def pack(self, weight: Matrix) -> PackedWeight:
        """For a linear layer."""
        self.packed += [] if isinstance(weight, Tensor) else [weight]
        return pack(weight, self.dtype, self.is_resident)

    def stored_weight(self, name: str) -> Stored:
        """The weight of a linear module as the checkpoint has it, packed or not; see `matrix` for its dtype."""
        how = self._config.quantization
        if how is not None and name + ".weight_packed" in self._weights:
            self._unread.discard(name + ".weight_shape")
            words, shape = self.tensor(name + ".weight_packed", torch.int32), self._weights[name + ".weight_shape"]
            if (words.shape[0], words.shape[1]) != (int(shape[0]), -(-int(shape[1]) // INT4_PER_WORD)):
                raise BadCheckpoint(f"tensor {name}.weight_packed, {list(words.shape)}, does not hold {shape.tolist()}")
            factors = self._weights[name + ".weight_scale"]
            return read_int4(words, self.tensor(name + ".weight_scale", factors.dtype), int(shape[1]), how.block[1])
        if how is not None and how.packing is Packing.FP8_BLOCKS and name + ".weight_scale_inv" in self._weights:
            patterns = self.tensor(name + ".weight", torch.float8_e4m3fn)
            return read_fp8(patterns, self.tensor(name + ".weight_scale_inv", torch.float32), how.block)
        return self.matrix(name + ".weight")

    def check_all_read(self) -> None:
        """Every expected tensor must have found its place: a model without it would compute something else."""
        assert not self._unread, f"tensors that no building block read: {sorted(self._unread)[:4]}"
