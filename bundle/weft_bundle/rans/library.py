"""The C++ of the entropy coder, in a shared library of its own that is built like the kernels'."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from weft_kernels.native import INT, LONG, POINTER, chosen_isa, open_library
from weft_kernels.native.build import KERNELS, SourceSet

RANS = SourceSet(
    library="weft-bundle",
    root=Path(__file__).parent,
    sources=("choose.cpp", "decode.cpp", "encode.cpp", "tables.cpp"),
    headers=(
        *("coder.h", "decode_avx2.h", "decode_vbmi.h", "encode_vbmi.h", "format.h", "lanes.h", "scales.h"),
        *("stream.h", "vbmi.h", str(KERNELS.root / "native/vector.h")),
    ),
)
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "weft_rans_choose": ([POINTER, LONG, LONG, INT, *[POINTER] * 4], ctypes.c_double),
    "weft_rans_decode": ([POINTER, LONG, INT], None),
    "weft_rans_encode": ([*[POINTER] * 6, INT, INT, *[POINTER] * 4], LONG),
    "weft_rans_slots": ([POINTER, INT, POINTER, POINTER], None),
    "weft_rans_tables": ([POINTER, INT, POINTER], None),
}


def native() -> ctypes.CDLL | None:
    """Return the library for this machine; the first call may compile it. None: numpy codes, slowly."""
    return load(chosen_isa())


@cache
def load(isa: str) -> ctypes.CDLL | None:
    """Return the library of one instruction set, or None if it cannot be built or opened."""
    if (library := open_library(isa, RANS)) is None:
        return None
    for name, (types, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library
