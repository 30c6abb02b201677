"""The gateway: accepts OpenAI, Anthropic and gRPC requests, sends token ids to the workers and returns text."""
