"""`weft bench`: load any OpenAI-compatible server, by a recipe or a trace, and say what its users would have felt."""
