"""A real model, SmolLM2-135M-Instruct, from its GGUF file to answers over HTTP."""
