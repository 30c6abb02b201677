"""Who asks and what they may: API keys, their limits, and the visitor that the rest of the gateway sees."""
