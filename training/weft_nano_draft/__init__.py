"""An EAGLE-3.1 draft head for Weft Nano.

`answers` lets the target model answer dialogues, `head` is the shape and the file format, `unroll` the training pass,
`train` the loop and `walk` the measure of accepted drafts.
"""
