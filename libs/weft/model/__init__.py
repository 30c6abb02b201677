"""Model families, one file each, read from Hugging Face checkpoints as they are."""
