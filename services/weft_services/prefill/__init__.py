"""The prefill worker: computes prompts and lends their KV blocks for as long as the borrower's call is open."""
