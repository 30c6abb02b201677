"""Each kernel against its reference, and the references against transformers."""
