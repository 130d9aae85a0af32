"""`python -m benchmarks.torch_npu_wheel --python PYTHON`, in porter's own environment."""

import sys

from benchmarks.torch_npu_wheel.run import main

if __name__ == "__main__":
    sys.exit(main())
