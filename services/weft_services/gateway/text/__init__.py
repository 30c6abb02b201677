"""What models read and write: chat templates, tokens, stop strings, thoughts and tool calls. No I/O."""
