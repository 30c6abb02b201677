"""`python -m weft_kernels.native` builds the C++ kernels ahead of time; `weft_bundle.rans` does the same for its own.

`all`: every instruction set, for an image that runs on other machines. `here`: the sets of this processor. `best`: the
fastest of them.
"""

from __future__ import annotations

import subprocess
import sys

from weft_kernels.native.build import FLAGS, KERNELS, BuildFailed, SourceSet, cached_library
from weft_kernels.native.processor import best_isa, is_supported_machine, most_isa


def main(code: SourceSet = KERNELS) -> int:
    """Build the libraries of `code`. Returns 1 if that is impossible; Weft then computes without them."""
    if not is_supported_machine():
        print("CPU kernels: there is no build for this kind of machine, torch does their work", file=sys.stderr)
        return 1
    try:
        for isa in wanted(sys.argv[1] if len(sys.argv) > 1 else "all"):
            print(cached_library(isa, code))
    except (BuildFailed, OSError, subprocess.TimeoutExpired) as error:
        print(f"CPU kernels: torch does their work, which is slower: {error}", file=sys.stderr)
        return 1
    return 0


def wanted(which: str) -> list[str]:
    """Return the instruction sets to build, the smallest first. Raises SystemExit for an unknown choice."""
    every = list(FLAGS)
    if which not in ("all", "here", "best"):
        sys.exit(f"{which}: expected all, here or best")
    if which == "all":
        return every
    if most_isa() not in FLAGS:  # an older processor
        return []
    return [best_isa()] if which == "best" else every[: every.index(most_isa()) + 1]


if __name__ == "__main__":
    sys.exit(main())
