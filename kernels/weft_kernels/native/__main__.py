"""`python -m weft_kernels.native` builds the C++ kernels for this kind of machine, so that no process has to later."""

from __future__ import annotations

import subprocess
import sys

from weft_kernels.native.build import FLAGS, BuildFailed, cached_library, is_supported_machine


def main() -> int:
    """Build every library; 1 where that is not possible, which Weft survives."""
    if not is_supported_machine():
        print("CPU kernels: there is no build for this kind of machine, torch does their work", file=sys.stderr)
        return 1
    try:
        for isa in FLAGS:
            print(cached_library(isa))
    except (BuildFailed, OSError, subprocess.TimeoutExpired) as error:
        print(f"CPU kernels: torch does their work, which is slower: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
