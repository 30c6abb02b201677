"""Loads checkpoint tensors by name: checks them against the config, cuts a rank's part, moves it to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.group_rank import GroupRank
from weft.model.quantization import is_packed, is_shape, stored_dtypes, stored_parts
from weft.model.sharding import ShardSlice, Slices
from weft.model.spec import ModelConfig, Packing
from weft.model.tensors import Shapes, expected_tensors, is_ignored, stored_name
from weft.model.unpacking import PackedModule, unpack_mxfp4
from weft_kernels.linear import PackedWeight, pack
from weft_kernels.packed import F12, Fp8, Int4, Matrix, Stored, as_f12, on_device, stack


@dataclass(frozen=True, slots=True)
class CenteredNorm:
    """Weight and bias of a LayerNorm."""

    weight: Tensor
    bias: Tensor | None


Tensors = Mapping[str, Tensor]
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class Loader:
    """Gives each building block the tensors that it asks for by full name."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        is_resident: bool = False,
        slices: Slices | None = None,
        expected: tuple[Shapes, Shapes] | None = None,
        rank: GroupRank | None = None,
    ) -> None:
        """With `is_resident`, matrices take the form that `weft_kernels.packed.as_f12` gives them, or on a CPU
        `weft_kernels.linear.pack`.

        `config` and `weights` are those of the whole model. `slices` names the tensors of which only a part is loaded,
        a linear weight as `<module>.weight` in every format. FP8 is cut at blocks, INT4 at words and groups. F12 and
        12-bit CPU panels are packed after the cut, so they can be cut anywhere. `rank`: the rank that loads, which has
        slices of its own. `expected`: the tensors as they are
        stored and as they would be without quantization, if these are not the whole model of `config`.

        Raises BadCheckpoint if a tensor is missing, has another shape, or is not part of the model.
        """
        shapes, plain = expected or (expected_tensors(config), expected_tensors(replace(config, quantization=None)))
        for name, shape in shapes.items():
            if name not in weights:
                raise BadCheckpoint(f"tensor {name} is missing")
            if not is_shape(tuple(weights[name].shape), shape):
                raise BadCheckpoint(f"tensor {name} has shape {list(weights[name].shape)}, expected {list(shape)}")
            if DTYPE_NAMES.get(weights[name].dtype) not in stored_dtypes(name, shapes, config.quantization):
                raise BadCheckpoint(f"tensor {name} has dtype {weights[name].dtype}, which it cannot be stored in")
        for name in weights:
            if name not in shapes and not is_ignored(name, config):
                raise BadCheckpoint(f"tensor {name} is not part of a {config.architecture}")
        self.rank = rank or GroupRank()
        self._slices = {**(slices or {}), **self.rank.shard.slices(config)}
        self._shapes = plain
        for name, part in self._slices.items():
            if name not in self._shapes:
                raise ValueError(f"slice of {name}: {config.architecture} has no such tensor; use a full name")
            part.check(name, self._shapes[name])
        self._weights = weights
        self.config = config
        self._unread = set(shapes) - self.rank.shard.missing(config)
        self.dtype = dtype
        self.device = device
        self.is_resident = is_resident
        self.packed: list[F12 | Fp8 | Int4] = []  # what linear layers multiply

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor, or this rank's part of it, in `dtype` or else in the model's dtype."""
        name = stored_name(name, self.config)
        return self._read(name, dtype or self.dtype, self._slices.get(name))

    def norm(self, name: str) -> Tensor:
        """Return the weight of an RMS norm. With an offset it is float32, because a sum near 1 would lose digits."""
        offset = self.config.norm_offset
        return self.tensor(name + ".weight", torch.float32) + offset if offset else self.tensor(name + ".weight")

    def layer_norm(self, name: str) -> Tensor | CenteredNorm:
        """Return a norm of the residual stream: the weight of an RMS norm, or what a LayerNorm has."""
        weight, norms = self.norm(name), self.config.norms
        if not norms.is_centered:
            return weight
        return CenteredNorm(weight, self.tensor(name + ".bias", weight.dtype) if norms.has_bias else None)

    def bias(self, *names: str) -> Tensor:
        """Return the biases of linear modules, one after the other."""
        return torch.cat([self.tensor(name + ".bias") for name in names])

    def bias_of_sum(self, name: str) -> Tensor | None:
        """Return the bias of a module with results that ranks sum up; None on all ranks but the first."""
        bias = self.bias(name)
        return bias if self.rank.shard.is_first else None

    def matrix(self, name: str) -> Tensor:
        """Return a matrix that is to be packed or looked up in.

        On a CPU bfloat16 keeps its dtype, because the kernels widen it as they read it.
        """
        is_kept = self.device.type == "cpu" and self._weights[stored_name(name, self.config)].dtype == torch.bfloat16
        return self.tensor(name, torch.bfloat16 if is_kept else None)

    def table(self, name: str) -> Tensor | F12:
        """Return an embedding table in the form in which it stays in memory."""
        return as_f12(self.matrix(name)) if self.is_resident else self.matrix(name)

    def linear(self, *names: str, order: Tensor | None = None) -> PackedWeight:
        """Return linear modules stacked into one. `order` permutes the stacked outputs of this rank."""
        whole = stack([self.stored_weight(name) for name in names], order, self.dtype)
        return self.pack(on_device(whole, self.dtype, self.is_resident))

    def pack(self, weight: Matrix) -> PackedWeight:
        """Pack a matrix for linear layers."""
        self.packed += [] if isinstance(weight, Tensor) else [weight]
        return pack(weight, self.dtype, self.is_resident)

    def stored_weight(self, name: str) -> Stored:
        """Return a linear module's weight in the checkpoint's format; see `matrix` for the dtype of plain ones."""
        how, own_name, name = self.config.quantization, name, stored_name(name, self.config)
        part = self._slices.get(name + ".weight")
        if how is None or not is_packed(name, self._weights, how):
            return self.matrix(own_name + ".weight")
        shape = self._shapes[name + ".weight"]
        rows, columns = shape[0], shape[1]
        parts = {each: self._weights[f"{name}.{each}"] for each in stored_parts(how, (rows, columns))}
        self._unread -= {f"{name}.{each}" for each in parts}

        def cut(which: str, tensor: Tensor, block: tuple[int, int]) -> Tensor:
            # one factor of a whole dimension is that of every part
            if part is None or block[part.dim] >= shape[part.dim]:
                return tensor.to(self.device)
            return self._cut(tensor, part.in_blocks(f"{name}.{which}", block[part.dim], shape[part.dim]))

        num_columns = part.size if part and part.dim else columns
        if how.is_expanded or how.packing is Packing.AWQ:  # repacked on its device
            parts = {each: tensor.to(self.device) for each, tensor in parts.items()}
        return PackedModule(name, how, (rows, columns), num_columns, parts, cut, self.dtype).read()

    def expert_matrices(self, name: str) -> Iterator[Tensor]:
        """Yield the matrix [outputs, inputs] of each of the fused experts `name`.

        MXFP4 is exact in bfloat16, which a CPU keeps. Packed experts are unpacked one by one: all of a layer may take
        gigabytes.
        """
        is_output_first = self.config.experts is not None and self.config.experts.is_output_first
        own_name, name = name, stored_name(name, self.config)
        if not is_packed(name, self._weights, self.config.quantization):
            yield from self.matrix(own_name) if is_output_first else self.matrix(own_name).mT
            return
        blocks, scales = (self._weights[f"{name}_{part}"] for part in ("blocks", "scales"))
        self._unread -= {f"{name}_blocks", f"{name}_scales"}
        part, dtype = self._slices.get(name), torch.bfloat16 if self.device.type == "cpu" else self.dtype
        of_rank = part.ranges if part is not None and not part.dim else ((0, len(blocks)),)
        if part is not None and part.experts is not None:
            of_rank = (part.experts,)
        for index in (index for start, stop in of_rank for index in range(start, stop)):
            matrix = unpack_mxfp4(blocks[index].to(self.device), scales[index].to(self.device))
            if part is not None and part.dim:
                matrix = self._cut(matrix, ShardSlice(part.dim - 1 if is_output_first else 2 - part.dim, part.ranges))
            yield matrix.to(dtype)

    def check_all_read(self) -> None:
        """Assert that every expected tensor was read: a model without one of them computes something else."""
        assert not self._unread, f"tensors that no building block read: {sorted(self._unread)[:4]}"

    def _read(self, name: str, dtype: torch.dtype, part: ShardSlice | None) -> Tensor:
        self._unread.discard(name)
        tensor = self._weights[name]
        cut = tensor if part is None else self._cut(tensor, part)
        return cut.to(device=self.device, dtype=dtype)

    def _cut(self, tensor: Tensor, part: ShardSlice) -> Tensor:
        if part.experts is not None:
            tensor = tensor[slice(*part.experts)]
        pieces = [tensor.narrow(part.dim, start, stop - start) for start, stop in part.ranges]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)).contiguous().to(self.device)
