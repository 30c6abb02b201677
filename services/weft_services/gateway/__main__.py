"""`python -m weft_services.gateway`: settings from the environment, serve until a signal."""

from __future__ import annotations

import logging
import sys

from weft import log
from weft.config import ConfigError, describe, read_config
from weft.errors import WeftError
from weft.rpc.server import run
from weft_services.gateway.config import Config
from weft_services.gateway.process import serve


def main() -> None:
    """Exits with a readable line when the process cannot start."""
    log.setup("gateway")
    try:
        config = read_config(Config)
        logging.getLogger(__name__).info("%s", describe(config))
        run(lambda: serve(config))
    except* (ConfigError, WeftError, OSError) as group:
        sys.exit(f"gateway: {group.exceptions[0]}")


if __name__ == "__main__":
    main()
