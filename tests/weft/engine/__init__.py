"""The engine against transformers, and its bookkeeping without torch."""
