"""`python -m weft_services.gateway`: read settings from the environment and serve until a signal."""

from __future__ import annotations

import logging
from functools import partial

from weft import log, trace
from weft.config import read_config
from weft.hub import fetch_model
from weft.rpc.server import run
from weft.weights.object_store import with_local_model
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.process import serve

IN_THE_CLEAR = (
    "api keys and prompts cross any network before this listener unencrypted host=%s; set a certificate with "
    "WEFT_TLS_CERT and WEFT_TLS_KEY, or put a TLS proxy in front that alone can reach this listener"
)


async def main() -> None:
    """Serve until a signal. `run` reports a wrong setting, a bad model or a taken port in one line."""
    config = read_config(GatewayConfig, with_local_model(fetch=partial(fetch_model, has_weights=False)))
    logging.getLogger(__name__).info("%s", config)
    if config.sends_keys_in_clear:
        logging.getLogger(__name__).warning(IN_THE_CLEAR, config.host)
    trace.setup("gateway")
    log.startup_phase("imports")
    await serve(config)


if __name__ == "__main__":
    log.setup("gateway")
    run(main)
