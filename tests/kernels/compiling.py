"""Stand-ins for kernels, which compile a launch for Hopper, or ignore it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}


class Recorder:
    """Stands in for a kernel: takes the launch and compiles it instead."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.figures: dict[str, int] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        constants.pop("launch_pdl", None)
        chosen = {name: constants.pop(name, None) for name in ("maxnreg", "enable_fp_fusion")}
        options = {"num_warps": num_warps, "num_stages": num_stages}
        options |= {name: value for name, value in chosen.items() if value is not None}
        names = [param.name for param in self.kernel.params]
        values = {**dict(zip(names, args, strict=False)), **constants}
        signature, aligned = {}, {}
        for index, name in enumerate(names):
            value = values[name]
            if name in constants:
                signature[name] = "constexpr"
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                signature[name] = f"tensordesc<{NAMES[value.base.dtype]}[{block}],{value.layout!r}>"
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + NAMES[value.dtype]
                if not self.kernel.params[index].do_not_specialize_on_alignment:
                    aligned[(index,)] = [["tt.divisibility", 16]]
            elif self.kernel.params[index].do_not_specialize:
                signature[name] = "i32"
            elif isinstance(value, int) and value == 1:
                # as a launch does: it becomes part of the kernel
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    aligned[(index,)] = [["tt.divisibility", 16]]
        make_source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = make_source(self.kernel, signature, constants, aligned)
        built = triton.compile(source, target=TARGET, options=options)
        cubin, is_gluon = built.asm["cubin"], self.kernel.is_gluon()
        self.figures = {"shared": built.metadata.shared, **_resources(cubin), **(_products(cubin) if is_gluon else {})}
        self.figures["fused"] = built.asm["ptx"].count("fma.rn.f32")


@cache
def _resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and its stack: what did not fit. A launcher may launch one kernel dozens of times."""
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", _shown(cubin, "-res-usage"))}


@cache
def _products(cubin: bytes) -> dict[str, int]:
    """Products of groups of warps, and waits for them."""
    sass = _shown(cubin, "-sass")
    return {"products": len(re.findall(r"\bHGMMA\.", sass)), "waits": len(re.findall(r"WARPGROUP\.DEPBAR", sass))}


def _shown(cubin: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


class Ignored:
    """Stands in for the kernels that are not asked for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: None
