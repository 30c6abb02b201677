"""Authentication and limits: API keys, rate limits and the principal of the current request."""
