"""`python -m weft_services.gateway`: settings from the environment, serve until a signal."""

from __future__ import annotations

import logging

from weft import log, trace
from weft.config import format_config, read_config
from weft.rpc.server import run
from weft.weights.objects import with_local_model
from weft_services.gateway.config import Config
from weft_services.gateway.process import serve

IN_THE_CLEAR = (
    "API keys and prompts cross the network in the clear: clients reach %s without TLS. Name a certificate with "
    "WEFT_TLS_CERT and WEFT_TLS_KEY, or let a proxy that has one stand before this listener, alone within its reach"
)


async def main() -> None:
    """Until a signal. A wrong setting or model, or a port that is taken, is told in one line by `run`."""
    config = read_config(Config, with_local_model())
    logging.getLogger(__name__).info("%s", format_config(config))
    if config.shows_keys:
        logging.getLogger(__name__).warning(IN_THE_CLEAR, config.publish_host or config.host)
    trace.setup("gateway")
    log.startup_phase("imports")
    await serve(config)


if __name__ == "__main__":
    log.setup("gateway")
    run(main)
