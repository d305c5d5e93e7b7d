"""What a run leaves and how it goes on: its folder, its record, snapshots, stop and resume.

The recipe calls it around its steps, and computes the gradients and takes the steps itself.
"""

from common.run.begin import start
from common.run.folder import Run
from common.run.loop import Loop
from common.run.micro_batches import MicroBatches
from common.run.options import RunOptions
from common.run.parts import make_loaders, make_model
from common.run.plan import Plan, make_plan

__all__ = [
    "Loop",
    "MicroBatches",
    "Plan",
    "Run",
    "RunOptions",
    "make_loaders",
    "make_model",
    "make_plan",
    "start",
]
