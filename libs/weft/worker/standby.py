"""A process that has imported what workers need and waits to be told which one to be, so that a dead one is back soon.

`python -m weft.worker.standby MODULE...` imports these; then one line on its standard input, a JSON object with a
`module` and its `environ`, makes it `python -m module`. The end of the input ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

from weft.engine.manners import CPU_NICENESS, give_way


def main() -> None:
    """Import, wait, become."""
    # imports take seconds of a core: steps must not wait for a process that nobody needs yet
    with ThreadPoolExecutor(1, initializer=give_way, initargs=(CPU_NICENESS,)) as aside:
        list(aside.map(importlib.import_module, sys.argv[1:]))
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv[1:] = []
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
