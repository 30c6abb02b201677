"""The public traces that simulations and replays read: an option that names one."""

from __future__ import annotations

import argparse
from pathlib import Path

ORIGIN = "FAST25-release/traces/conversation_trace.jsonl of https://github.com/kvcache-ai/Mooncake"


def trace_file(given: str) -> Path:
    """For argparse, which tells where a trace is had from in place of a traceback."""
    path = Path(given)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{given}: no such file; mooncake_conversation.jsonl is {ORIGIN}")
    return path
