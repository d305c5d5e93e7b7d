"""What is trained: models, the optimizer's options, how gradients are averaged, evaluation.

Nothing here knows where the data come from or what a run leaves.
"""

from common.training.ddp import ParallelOptions, synchronize_batch_norm, warm_up
from common.training.evaluation import evaluate
from common.training.losses import LossOptions, cross_entropy_of_samples
from common.training.models import ModelOptions, build_model, move
from common.training.optimizer import (
    Default,
    OptimizerOptions,
    ScheduleOptions,
    make_optimizer,
    set_lr,
)

__all__ = [
    "Default",
    "LossOptions",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "ScheduleOptions",
    "build_model",
    "cross_entropy_of_samples",
    "evaluate",
    "make_optimizer",
    "move",
    "set_lr",
    "synchronize_batch_norm",
    "warm_up",
]
