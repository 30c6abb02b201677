"""Before anything else is imported: kernels run in Triton's interpreter where there is no GPU, and gRPC takes no part
in forks.

Triton and gRPC choose when they are first imported, and another package may be the one to import them.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# children that run a program of their own at once; gRPC's handlers fail in them while its threads are busy
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# how long an example takes to draw or to run says how busy the machine is
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")
