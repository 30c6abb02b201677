"""The line of accounting that Claude Code writes in front of its system prompt, for Anthropic's servers alone.

    x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli; cch=0f3a1;

Its `cch` differs in each request, so that no block of the prompt would be found in a cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Pairs of name and value, each ended by a semicolon; only the last one may go without, at the end of the line. Some
# proxies join the line and the prompt without a break: what follows the pairs stays, wherever it begins.
_PAIR = r"[ \t]*[\w.-]+=[^;\s]*"
_LAST = rf"{_PAIR}(?=[ \t]*(?:[\r\n]|\Z))"
_HEADER = re.compile(rf"x-anthropic-billing-header:(?:(?:{_PAIR};)++(?:{_LAST})?|{_LAST})[ \t]*[\r\n]*", re.ASCII)


def without_billing_header(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """A conversation without that line at its very beginning and the line breaks behind it. A system message that holds
    nothing else is left out if others follow."""
    first = messages[0]
    if first["role"] not in ("system", "developer") or (found := _HEADER.match(first["content"] or "")) is None:
        return messages
    rest = first["content"][found.end() :]
    return messages[1:] if not rest and len(messages) > 1 else [{**first, "content": rest}, *messages[1:]]
