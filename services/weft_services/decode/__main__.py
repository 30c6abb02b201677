"""`python -m weft_services.decode`: one decode worker."""

from __future__ import annotations

from weft.log import engine_imports

with engine_imports("decode"):
    from weft.worker.process import run_worker
    from weft_services.decode.service import DECODE_ROLE

if __name__ == "__main__":
    run_worker("decode", DECODE_ROLE)
