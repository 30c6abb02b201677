"""The life of a request as one enum. Settlements, the ends in metrics and the access log, and the time
spent in each stage (`weft_request_stage_seconds`) are named by it.

    received -> routed -> reserved -> prefilling -> transferring -> decoding -> finished
        \\_________\\__________\\___________\\_____________\\____________\\-> failed
                                                                       \\-> cancelled

received      the gateway has validated, rendered and tokenized it
routed        the scheduler has named its workers and booked its tokens
reserved      the decode worker holds blocks for its prompt
prefilling    the prompt is being computed (on the prefill worker, or on the decode worker itself)
transferring  the prompt is computed and its first token told, its last blocks are on their way
decoding      tokens come out
finished, failed, cancelled   terminal: exactly one of them, exactly once
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """Where a request is. The value is the label used in metrics and logs."""

    RECEIVED = "received"
    ROUTED = "routed"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Nothing follows this stage."""
        return self in _TERMINAL


_TERMINAL = frozenset((Stage.FINISHED, Stage.FAILED, Stage.CANCELLED))
