"""`python -m weft_services.gateway`: settings from the environment, serve until a signal."""

from __future__ import annotations

import logging

from weft import log, trace
from weft.config import describe, read_config
from weft.rpc.server import run
from weft.weights.objects import with_local_model
from weft_services.gateway.config import Config
from weft_services.gateway.process import serve


async def main() -> None:
    """Until a signal. A wrong setting or model, or a port that is taken, is told in one line by `run`."""
    config = read_config(Config, with_local_model())
    logging.getLogger(__name__).info("%s", describe(config))
    trace.setup("gateway")
    log.mark("imports")
    await serve(config)


if __name__ == "__main__":
    log.setup("gateway")
    run(main)
