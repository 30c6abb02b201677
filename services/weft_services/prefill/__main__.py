"""`python -m weft_services.prefill`: one prefill worker."""

from __future__ import annotations

from weft.log import engine_imports

with engine_imports("prefill"):
    from weft.worker.process import run_worker
    from weft_services.prefill.service import PREFILL_ROLE

if __name__ == "__main__":
    run_worker("prefill", PREFILL_ROLE)
