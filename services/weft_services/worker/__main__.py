"""`python -m weft_services.worker`: a worker with both roles."""

from __future__ import annotations

from weft.log import engine_imports

with engine_imports("worker"):
    from weft.worker.process import run_worker
    from weft_services.decode.service import DECODE_ROLE
    from weft_services.prefill.service import PREFILL_ROLE

if __name__ == "__main__":
    run_worker("worker", PREFILL_ROLE, DECODE_ROLE)
