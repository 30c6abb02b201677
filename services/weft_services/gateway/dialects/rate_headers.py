"""A key's limits as OpenAI's and Anthropic's clients read them in the headers of an answer. Text only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from weft_services.gateway.access.limiter import Level

Headers = list[tuple[bytes, bytes]]


def openai_headers(levels: Sequence[Level]) -> Headers:
    """x-ratelimit-limit-requests and its kin; when a bucket will be empty, as a duration."""
    fields = []
    for level in levels:
        values = {"limit": str(level.limit), "remaining": str(level.remaining), "reset": duration(level.seconds)}
        fields += [(f"x-ratelimit-{name}-{level.kind}".encode(), value.encode()) for name, value in values.items()]
    return fields


def anthropic_headers(levels: Sequence[Level], now: datetime | None = None) -> Headers:
    """anthropic-ratelimit-requests-limit and its kin; when a bucket will be empty, as a moment."""
    fields = []
    for level in levels:
        reset = (now or datetime.now(UTC)) + timedelta(seconds=level.seconds)
        values = {
            "limit": str(level.limit),
            "remaining": str(level.remaining),
            "reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        fields += [
            (f"anthropic-ratelimit-{level.kind}-{name}".encode(), value.encode()) for name, value in values.items()
        ]
    return fields


def duration(seconds: float) -> str:
    """As Go writes it: 12ms, 8.64s, 1m26.4s, 6m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
