"""The command line: weft up, chat, generate and status."""
