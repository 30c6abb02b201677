"""Reading, checking and sharing checkpoints."""
