"""What the recipe reports about its weights."""

from pathlib import Path

import torch
from torch import Tensor, nn

from common import log


def show_inference(plain: nn.Module, model: nn.Module, images: Tensor, path: Path) -> None:
    """Load the saved weights into `plain` on a CPU, and compare its predictions with `model`'s."""
    plain.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    with torch.inference_mode():
        ours = plain.eval()(images.cpu().float()).argmax(1)
        theirs = model.eval()(images).argmax(1).cpu()
    same = int((ours == theirs).sum())
    log.info(f"{path.name} in a plain model on a CPU: {same} of {len(ours)} predictions the same")
