"""Before anything else is imported: kernels run in Triton's interpreter where there is no GPU.

Triton chooses when it is first imported, and transformers may be the one to import it.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
