"""`python -m benchmarks.drift`."""

import sys

from benchmarks.drift.run import main

if __name__ == "__main__":
    sys.exit(main())
