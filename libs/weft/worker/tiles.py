"""Tries tiles for a model's packed matrices on this worker's GPU, within the time that the settings give."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from weft.model.decoder import Decoder

logger = logging.getLogger(__name__)


def tune_tiles(decoder: Decoder, rows: Iterable[int], max_seconds: float) -> None:
    """Beside what has been tried before; a cache that cannot be written is no reason to fail."""
    from weft_kernels.packed.tune_all import tune_all  # needs Triton
    from weft_kernels.replayed import replayed_seconds

    try:
        num_tuned = tune_all(decoder.packed, rows, replayed_seconds, max_seconds)
    except OSError as error:
        logger.warning("tiles are not kept for the next start: %s", error)
    except RuntimeError as error:  # no memory beside the model, or a capture that fails
        logger.warning("tiles are not tried any further, those at hand are used: %s", error)
    else:
        logger.info("tiles: %d products tuned", num_tuned)
