"""`python -m weft_bundle.rans` builds the C++ of the entropy coder ahead of time, as `weft_kernels.native` does."""

import sys

from weft_bundle.rans.library import RANS
from weft_kernels.native.__main__ import main

if __name__ == "__main__":
    sys.exit(main(RANS))
