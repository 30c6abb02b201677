"""Other people's clients in front of the gateway: LiteLLM, the TypeScript SDKs, Schemathesis."""
