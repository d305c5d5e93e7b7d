"""ddp_launch beside other libraries that do the same training: `make bench WHAT=peers`."""

import os

# As in common/cli.py, before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
