"""How long answers are, learned from those that have ended. Knows counts by model, nothing of text."""

from __future__ import annotations

from collections import OrderedDict

# until the first answer has ended
DEFAULT_OUTPUT_TOKENS = 256.0
# weight of the newest answer; about the last hundred count
NEWEST_SHARE = 0.02
MAX_MODELS = 1024


class OutputLengths:
    """Mean answer by model, with the past fading."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def learn(self, model: str, tokens: int) -> None:
        """An answer has ended by itself after so many tokens."""
        if tokens <= 0:
            return
        mean = self._means.get(model, DEFAULT_OUTPUT_TOKENS)
        self._means[model] = mean + NEWEST_SHARE * (tokens - mean)
        self._means.move_to_end(model)
        if len(self._means) > MAX_MODELS:
            self._means.popitem(last=False)

    def expected(self, model: str, max_tokens: int) -> int:
        """How many tokens the next answer will have, at most `max_tokens`."""
        return min(max_tokens, round(self._means.get(model, DEFAULT_OUTPUT_TOKENS)))
