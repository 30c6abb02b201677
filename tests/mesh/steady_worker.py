"""A worker whose draft model drafts before every step, so that what it achieves does not depend on measured times.

`python -m tests.mesh.steady_worker` takes the settings of `weft_services.worker`, and differs in nothing else.
"""

from __future__ import annotations

from unittest.mock import patch

from tests.weft.engine.steady_head import SteadyHead
from weft.worker import startup
from weft.worker.process import run_worker
from weft_services.decode.service import DECODE_ROLE
from weft_services.prefill.service import PREFILL_ROLE

if __name__ == "__main__":
    with patch.object(startup, "make_speculator", lambda draft, config, is_gpu: SteadyHead()):
        run_worker("steady", PREFILL_ROLE, DECODE_ROLE)
