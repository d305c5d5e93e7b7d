"""`python -m benchmarks.peers`: the same as `python -m tools.bench peers`."""

import sys

from common.launch.process import end_process
from tools import bench

if __name__ == "__main__":
    end_process(bench.main(["peers", *sys.argv[1:]]))
