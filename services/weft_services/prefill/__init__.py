"""The prefill worker: computes prompts and serves their KV blocks for as long as decode's call is open."""
