"""Lossless entropy coding of BF16 and FP16 tensors: exponents and leading mantissa bits by rANS, the rest as it is.

The symbol of a weight is its exponent and the two highest bits of its mantissa, less the power of two by which its row
and its column are louder than the tensor; what that power leaves as a fraction picks one of four tables.
`measure` looks at a whole tensor, `Encoder` and `Decoder` work on runs of it, independent of one another.
"""

from __future__ import annotations

from weft_kernels.rans.choosing import Measured, measure
from weft_kernels.rans.chunk import Chunk, rest_bytes
from weft_kernels.rans.coding import Coding, entropy_bits, entropy_of
from weft_kernels.rans.decoding import Decoder, Memory, Piece, decode
from weft_kernels.rans.encoding import Encoder, EncodingMemory
from weft_kernels.rans.reference import LANES

__all__ = [
    "LANES",
    "Chunk",
    "Coding",
    "Decoder",
    "Encoder",
    "EncodingMemory",
    "Measured",
    "Memory",
    "Piece",
    "decode",
    "entropy_bits",
    "entropy_of",
    "measure",
    "rest_bytes",
]
