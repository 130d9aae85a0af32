"""`python -m benchmarks.ascend_triton`, in an environment with triton-ascend and ascendnpu-ir."""

import sys

from benchmarks.ascend_triton.run import main

if __name__ == "__main__":
    sys.exit(main())
