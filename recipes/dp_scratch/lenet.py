"""LeNet as a function of bare tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.data.datasets import Data
from common.errors import InputError

SHAPES = {
    "conv1.weight": (20, 1, 3, 3),
    "conv1.bias": (20,),
    "conv2.weight": (50, 20, 5, 5),
    "conv2.bias": (50,),
    "fc1.weight": (128, 800),
    "fc1.bias": (128,),
    "fc2.weight": (10, 128),
    "fc2.bias": (10,),
}


def initialize(dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters: weights normal, divided by the square root of the number of inputs; biases 0."""
    return {
        name: torch.randn(shape, dtype=dtype) / torch.Size(shape[1:]).numel() ** 0.5
        if len(shape) > 1
        else torch.zeros(shape, dtype=dtype)
        for name, shape in SHAPES.items()
    }


def lenet(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """Logits (samples, 10) of images (samples, 1, 28, 28)."""
    p = parameters
    x = F.avg_pool2d(F.relu(F.conv2d(images, p["conv1.weight"], p["conv1.bias"])), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, p["conv2.weight"], p["conv2.bias"])), 2)
    x = F.relu(F.linear(x.flatten(1), p["fc1.weight"], p["fc1.bias"]))
    return F.linear(x, p["fc2.weight"], p["fc2.bias"])


def refuse_other_images(data: Data) -> None:
    """Raise InputError for images or classes that do not fit the shapes above."""
    found = (data.channels, data.side, len(data.class_names))
    if found != (1, 28, 10):
        raise InputError(
            "this LeNet takes grey images of 28 px in 10 classes, not {} channels, {} px, {} "
            "classes: give --data digits or fashion_mnist, and --image-size 28".format(*found)
        )
