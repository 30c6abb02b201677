"""Lossless entropy coding of BF16 and FP16 tensors: exponents and leading mantissa bits by rANS, the rest as it is.

The symbol of a weight is its exponent and the two highest bits of its mantissa, less the power of two by which its row
and its column are louder than the tensor; what that power leaves as a fraction picks one of four tables.
`measure` looks at a whole tensor, `Encoder` and `Decoder` work on runs of it, independent of one another.
"""

from __future__ import annotations

from weft_bundle.rans.codec import (
    AddressedBytes,
    CodedRun,
    DecodeTask,
    EncodeBuffers,
    RunDecoder,
    RunEncoder,
    decode,
    rest_bytes,
)
from weft_bundle.rans.codec_choice import CodingChoice, choose_coding
from weft_bundle.rans.coding import Coding, entropy_bits, entropy_of
from weft_bundle.rans.reference import LANES

__all__ = [
    "LANES",
    "AddressedBytes",
    "CodedRun",
    "Coding",
    "CodingChoice",
    "DecodeTask",
    "EncodeBuffers",
    "RunDecoder",
    "RunEncoder",
    "choose_coding",
    "decode",
    "entropy_bits",
    "entropy_of",
    "rest_bytes",
]
