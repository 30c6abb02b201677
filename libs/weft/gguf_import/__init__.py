"""Makes checkpoints in safetensors out of GGUF files. Needs the package `gguf`; no torch."""
