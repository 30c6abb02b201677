"""Weft Nano: a five-million-parameter Llama that speaks, calls tools and remembers what it was told.

`dialogues` makes the data, `tokenizer` the vocabulary, `train` the weights and `evaluate` the figures of the
model card. The result lies in `models/weft-nano/`.
"""
