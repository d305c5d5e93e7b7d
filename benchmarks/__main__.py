"""`python -m benchmarks [PART ...]`: the same as `python -m tools.bench`."""

import sys

from common.launch.process import end_process
from tools import bench

if __name__ == "__main__":
    end_process(bench.main(sys.argv[1:]))
