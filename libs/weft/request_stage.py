"""Stages of a request's life.

    received -> routed -> reserved -> prefilling -> transferring -> decoding -> finished
        \\_________\\__________\\___________\\_____________\\____________\\-> failed
                                                                       \\-> cancelled

received      the gateway has validated, rendered and tokenized it
routed        the scheduler has named its workers and booked its tokens
reserved      the decode worker holds blocks for its prompt
prefilling    the prompt is being computed (on the prefill worker, or on the decode worker itself)
transferring  the prompt is computed and its first token sent; its last blocks are in transfer
decoding      tokens come out
finished, failed, cancelled   terminal: exactly one of them, exactly once
"""

from __future__ import annotations

from enum import StrEnum


class RequestStage(StrEnum):
    """The stage of a request; the value is the label in metrics and logs."""

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
        """True if no stage follows this one."""
        return self in _TERMINAL


_TERMINAL = frozenset((RequestStage.FINISHED, RequestStage.FAILED, RequestStage.CANCELLED))
