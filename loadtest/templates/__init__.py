"""Chat templates of other people's models against transformers, and their calls against the gateway's readers."""
