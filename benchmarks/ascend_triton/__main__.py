"""`python -m benchmarks.ascend_triton`, in an environment with triton-ascend and ascendnpu-ir."""

import sys

from benchmarks.ascend_triton.tools import missing

if __name__ == "__main__":
    if absent := missing():
        print(*absent, sep="\n", file=sys.stderr)
        sys.exit(2)
    # It imports what has just been looked for.
    from benchmarks.ascend_triton.run import main

    sys.exit(main())
