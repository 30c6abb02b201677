"""Prompts that are computed here because their hand-off failed: how many tokens of them one worker takes on.

The first is always taken: a lost prefill worker costs a request time, and nothing else. When a whole prefill worker's
queue comes back at once, the rest goes to another one by way of the gateway, and who generates here is spared.
"""

from __future__ import annotations

from weft import metrics
from weft.errors import PeerLost
from weft.request import RequestKey

MAX_TOKENS = 8192


class Fallbacks:
    """Prompt tokens by sequence, from the failed hand-off to the first token."""

    def __init__(self) -> None:
        self._tokens: dict[RequestKey, int] = {}

    def has_room(self, num_tokens: int) -> bool:
        """`begin` would take them."""
        others = sum(self._tokens.values())
        return not others or others + num_tokens <= MAX_TOKENS

    def begin(self, key: RequestKey, num_tokens: int, lost_id: str) -> None:
        """Raises PeerLost when others fill the bound already; it names the prefill worker, if that was lost."""
        if not self.has_room(num_tokens):
            others = sum(self._tokens.values())
            raise PeerLost(f"the hand-off failed, and {others} such tokens are being computed", lost_id)
        self._tokens[key] = num_tokens
        self._observe()

    def end(self, key: RequestKey) -> None:
        """Computed, or given up; unknown keys change nothing."""
        if self._tokens.pop(key, None) is not None:
            self._observe()

    def _observe(self) -> None:
        metrics.FALLBACK_TOKENS.set(sum(self._tokens.values()))
