"""What packed weights could gain on an H200 at best, derived without one: what is read, multiplied and issued a weight.

    python -m loadtest.kernels.packed_bounds --out docs/results/packed-bounds.md

Compiles the kernels for Hopper, as a launch would, and counts the instructions of their main loop. A bound and no
forecast: nothing ever waits, and both sides read at the speed of a copy.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loadtest.provenance import made_at
from weft_kernels.packed import F12, Fp8, Int4, gemv
from weft_kernels.packed import linear as packed_linear
from weft_kernels.packed.product import form_constants, operands

# as measured on an H200: bytes of a copy and bfloat16 operations a second; lanes of instructions issued a second
COPIED, MULTIPLIED, ISSUED = 4.3e12, 780e12, 132 * 128 * 1.755e9
OUTPUTS, INPUTS = 14_336, 4096
ROWS = (1, 16, 64, 128, 256, 1024)
# Llama 3.1 8B: weights; bytes of KV a token; what a step takes besides, launched as one graph (estimated)
WEIGHTS, KV_BYTES, OTHER_SECONDS = 8.03e9, 128 * 1024, 0.6e-3
CONTEXT_TOKENS, BATCHES = 1024, (1, 8, 32)
F12_BYTES = 1.502
TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32", torch.float32: "*fp32"}


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds a weight."""

    reading: float
    issuing: float
    multiplying: float

    @property
    def slowest(self) -> str:
        """What it waits for."""
        parts = {"reading": self.reading, "issuing": self.issuing, "multiplying": self.multiplying}
        return max(parts, key=parts.__getitem__)

    @property
    def seconds(self) -> float:
        """Of the slowest."""
        return max(self.reading, self.issuing, self.multiplying)


def matrices() -> dict[str, F12 | Fp8 | Int4]:
    """Of one shape; what is in them does not matter."""
    i32, blocks = torch.int32, OUTPUTS // 64
    words, bases, starts = (torch.empty(n, dtype=i32) for n in (3 * OUTPUTS * INPUTS // 8, blocks, OUTPUTS // 4 + 1))
    escapes = OUTPUTS * INPUTS // 3000
    listed = torch.empty(escapes, dtype=i32), torch.empty(escapes, dtype=torch.bfloat16)
    groups = torch.empty(OUTPUTS, INPUTS // 32, dtype=torch.bfloat16)
    return {
        "F12": F12(OUTPUTS, INPUTS, words.view(3, OUTPUTS, -1), bases, starts, *listed),
        "FP8, blocks of 128": Fp8(
            INPUTS, torch.empty(OUTPUTS, INPUTS // 4, dtype=i32), torch.empty(OUTPUTS // 128, INPUTS // 128), (128, 128)
        ),
        "INT4, groups of 32": Int4(INPUTS, torch.empty(OUTPUTS, INPUTS // 8, dtype=i32), groups, 32),
    }


def bound_of(weight: F12 | Fp8 | Int4, rows: int) -> tuple[Bound, float]:
    """And how many instructions unpack and multiply a weight, for one tile of rows."""
    if isinstance(weight, F12) and rows == 1:
        constants = {"SIZE": INPUTS, "BLOCK_N": gemv.BLOCK_N, "BLOCK_J": 256, "num_warps": 2}
        slots = issued(gemv._gemv, weight, constants, gemv.BLOCK_N * 256 * 8)
        return Bound(weight.nbytes / OUTPUTS / INPUTS / COPIED, slots / ISSUED, 0.0), slots
    tiles = form_constants(weight, 64) | packed_linear._tiles(torch.empty(rows, 1, dtype=torch.bfloat16), weight)
    tiles.pop("programs", 0)
    slots = issued(packed_linear._gemm, weight, {"SIZE": INPUTS, **tiles}, tiles["BLOCK_N"] * tiles["BLOCK_K"])
    num_tiles = math.ceil(rows / tiles["BLOCK_M"])
    padded = num_tiles * tiles["BLOCK_M"]
    reading = weight.nbytes / OUTPUTS / INPUTS / COPIED
    return Bound(reading, slots * num_tiles / ISSUED, 2 * padded / MULTIPLIED), slots


def issued(kernel: Any, weight: F12 | Fp8 | Int4, constants: dict[str, int], num_weights: int) -> float:
    """Instructions of a lane for each weight that it unpacks, in the largest loop; `num_weights`: of one round."""
    options = {"num_warps": constants.pop("num_warps"), "num_stages": constants.pop("num_stages", 3)}
    x, is_single = torch.empty(2, dtype=torch.bfloat16), kernel is gemv._gemv
    constants |= {"HAS_BIAS": False, "USES_PDL": False} | ({} if is_single else {"TRANSPOSED": True})
    # the row alone comes in pairs, others a second time, turned; after the weights a bias, parts, how many of them are
    # there, and the result
    before, after = ([x.view(torch.int32)], [x]) if is_single else ([x, x], [x, x.float(), x.int()])
    tensors: list[Tensor] = [*before, *operands(weight, x), *after, x]
    names = [param.name for param in kernel.params]
    signature, aligned = {}, {}
    for index, name in enumerate(names):
        is_pointer = index < len(tensors)
        signature[name] = "constexpr" if name in constants else TYPES[tensors[index].dtype] if is_pointer else "i32"
        if name not in constants and name not in ("num_steps", "split_steps"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    cubin: bytes = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    return largest_loop(cubin) * 32 * options["num_warps"] / num_weights


def largest_loop(cubin: bytes) -> int:
    """Its instructions: from where a branch back leads to that branch."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", text)]
    loops = [0]
    for at, what in lines:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", what)
        if target and int(target[1], 16) < at:
            loops.append(sum(int(target[1], 16) <= other <= at for other, _ in lines))
    return max(loops)


def table() -> Iterator[str]:
    """Markdown."""
    yield "| weights | bits | rows | instructions each | room while it is read | bound by | times bfloat16 at best |"
    yield "|---|---|---|---|---|---|---|"
    for name, weight in matrices().items():
        for rows in ROWS:
            ours, slots = bound_of(weight, rows)
            plain = Bound(2 / COPIED, 0.0, 2 * rows / MULTIPLIED)
            bits, room = 8 * ours.reading * COPIED, ours.reading * ISSUED
            figures = (
                f"{bits:.2f} | {rows} | {slots:.1f} | {room:.1f} | {ours.slowest} | {plain.seconds / ours.seconds:.2f}"
            )
            yield f"| {name} | {figures} |"


def whole() -> Iterator[str]:
    """Of a whole step, and of unpacking: bytes over the speed of a copy."""
    yield f"Unpacking to bfloat16 reads {F12_BYTES:.2f} bytes a weight and writes 2:"
    yield f"{2 / (F12_BYTES + 2) * COPIED / 1e12:.2f} TB/s of bfloat16 at best (aim 2.2)."
    yield ""
    yield f"A decode step of Llama 3.1 8B: {WEIGHTS / 1e9:.2f} G weights, {CONTEXT_TOKENS} tokens of KV a sequence of"
    yield f"{KV_BYTES // 1024} KiB each, and {OTHER_SECONDS * 1e3:g} ms for all else (estimated). Aim: 1.12 times."
    yield ""
    yield "| sequences | bfloat16, ms | F12, ms | times at best |"
    yield "|---|---|---|---|"
    for batch in BATCHES:
        same = batch * CONTEXT_TOKENS * KV_BYTES / COPIED + OTHER_SECONDS
        plain, packed = (same + WEIGHTS * size / COPIED for size in (2.0, F12_BYTES))
        yield f"| {batch} | {plain * 1e3:.2f} | {packed * 1e3:.2f} | {plain / packed:.2f} |"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    text = [
        "# Packed weights on an H200: derived bounds",
        "",
        f"{made_at()}.",
        "",
        f"Derived; [measured](f12.md) since. A matrix of {OUTPUTS:,} x {INPUTS:,}; {COPIED / 1e12:g} TB/s and"
        f" {MULTIPLIED / 1e12:g} TFLOP/s as measured on an H200, {ISSUED / 1e12:.1f} T lanes of instructions a second;",
        f"instructions counted in the main loops that Triton {triton.__version__} compiles, anew for each tile of rows."
        " Nothing waits in this arithmetic: measure with",
        "`python -m loadtest.kernels.f12` and `python -m loadtest.kernels.quantized` where a GPU is.",
        "",
        *table(),
        "",
        *whole(),
    ]
    print("\n".join(text))
    if out is not None:
        out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
