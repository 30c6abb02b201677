"""What a model may write: answer formats and tools as one grammar, which the decode workers enforce."""
