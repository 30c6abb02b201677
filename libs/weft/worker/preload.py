"""Imports what every worker needs, once, in the process from which workers are forked.

A restarted worker then opens none of these files. Mooncake is left out: it has threads, which do not survive a fork.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  for a look-up of a host's name

import uvloop  # noqa: F401

import weft.weights.object_store  # noqa: F401
from weft_kernels.native import preload

preload()
