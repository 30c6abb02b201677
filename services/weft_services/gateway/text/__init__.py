"""What models write and read: chat templates, detokenizing, stop strings, thoughts and tool calls. No network."""
