"""What every worker begins with, done once where workers are forked from: importing this does it.

A restart then opens none of these files. Mooncake is not among them: it has threads, which no fork takes along.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  for a look-up of a host's name

import uvloop  # noqa: F401

import weft.weights.object_store  # noqa: F401
from weft_kernels.native import preload

preload()
