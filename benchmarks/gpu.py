"""ResNet-50 on one GPU: images/s of each setting, and the GPU's limits.

    python -m benchmarks.gpu cuda FILE      write JSON, also in between (cpu only tests this script)

The data are synthetic and on the device, as in published figures. All steps use one batch with
labels of 10 of 1,000 classes. It is learned quickly, so the losses of two settings can be compared.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from common.group.devices import synchronize
from common.seeds import mixed_precision, seed_everything
from common.training.models import ModelOptions, build_model
from common.writing import write_json

PUBLISHED = 3079.0
"""[images/s] 1x H200, AMP, NCHW, batch 2560, PyTorch 2.3: lambdal/deeplearning-benchmark."""


@dataclass(frozen=True)
class Setting:
    """How a step is computed."""

    batch_size: int
    precision: str = "bf16"
    channels_last: bool = True
    compiled: bool = False
    graph: bool = False
    """Record the whole step once as a CUDA graph, and replay it."""


SETTINGS = {
    "as published: fp16 with scaler, NCHW": Setting(2560, "fp16", channels_last=False),
    "bf16, NCHW": Setting(2560, channels_last=False),
    "bf16, channels_last": Setting(2560),
    "bf16, channels_last, compile": Setting(2560, compiled=True),
    "bf16, channels_last, batch 512": Setting(512),
    "bf16, channels_last, batch 512, CUDA graph": Setting(512, graph=True),
    "bf16, channels_last, compile, batch 512": Setting(512, compiled=True),
    "bf16, channels_last, compile, batch 512, CUDA graph": Setting(512, compiled=True, graph=True),
}
WARM_UP, STEPS = 4, 12


class Training:
    """A ResNet-50, its optimizer and one batch; a call takes one step."""

    def __init__(self, setting: Setting, device: torch.device, side: int) -> None:
        seed_everything(0)
        _, self.autocast, scaler = mixed_precision(setting.precision, device)
        # The default, 2^16, overflows in the first step, which is then left out.
        self.scaler = GradScaler(device.type, init_scale=2**10, enabled=scaler.is_enabled())
        options = ModelOptions(model="resnet50", stem="large")
        self.model = build_model(options, 3, 1000, side).to(device)
        self.images = torch.randn(setting.batch_size, 3, side, side, device=device)
        self.labels = torch.randint(10, (setting.batch_size,), device=device)
        if setting.channels_last:
            self.model.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if setting.compiled:
            self.forward = torch.compile(self.model, dynamic=False)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=0.003,  # larger ones overshoot, and the settings part ways
            momentum=0.9,
            weight_decay=1e-4,
            fused=not self.scaler.is_enabled(),
        )

    def __call__(self) -> Tensor:
        """Take a step; its loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = nn.functional.cross_entropy(self.forward(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def recorded(step: Training) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The step as a CUDA graph, and the losses of the three steps that must come before.

    Source: PyTorch, "CUDA semantics", whole-network capture.
    """
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        losses = [step() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss.clone()

    return replay, losses


def images_per_s(setting: Setting, device: torch.device, side: int) -> dict[str, Any]:
    """Train some steps: images/s, peak memory [bytes] and losses, or `out_of_memory`."""
    cuda = device.type == "cuda"
    gc.collect()  # the compiler's reference cycles keep the last setting's tensors
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        training = Training(setting, device, side)
        step, losses = recorded(training) if setting.graph else (training, [])
        losses += [step() for _ in range(WARM_UP - len(losses))]
    except RuntimeError as error:  # cuDNN's own words, if it finds no memory for its search
        if isinstance(error, torch.OutOfMemoryError) or "unable to find an engine" in str(error):
            return {**asdict(setting), "out_of_memory": True}
        raise
    synchronize(device)
    start_s = time.perf_counter()
    losses += [step() for _ in range(STEPS)]
    synchronize(device)
    elapsed_s = time.perf_counter() - start_s
    return {
        **asdict(setting),
        "images_per_s": STEPS * setting.batch_size / elapsed_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "losses": torch.stack(losses).tolist(),
    }


def rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """How many times `amount` per second, if a call of `work` is one; the best of 5 x 10 calls."""
    times = []
    for _ in range(6):
        start_s = time.perf_counter()
        for _ in range(10):
            work()
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return 10 * amount / min(times[1:])


def limits(device: torch.device) -> dict[str, float]:
    """Measured copy bandwidth [bytes/s] and bf16 matrix rate [operations/s] of the device."""
    large = device.type == "cuda"
    size = 8192 if large else 512
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    source = torch.empty(2**30 if large else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "bytes_per_s": rate(lambda: target.copy_(source), 2 * source.numel(), device),
        "operations_per_s": rate(lambda: a @ b, 2 * size**3, device),
    }


class Roofline(TorchDispatchMode):
    """Adds up the shortest possible time of each operator, from its bytes and its operations."""

    def __init__(self, found: dict[str, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits, self.seconds, self.bytes, self.operations = found, 0.0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it; a view moves no bytes."""
        with FlopCounterMode(display=False) as counter:
            result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        moved = 0 if func.is_view else sum(tensor.nbytes for tensor in tensors)
        operations = counter.get_total_flops()
        self.bytes, self.operations = self.bytes + moved, self.operations + operations
        self.seconds += max(
            moved / self.limits["bytes_per_s"], operations / self.limits["operations_per_s"]
        )
        return result


def least_time(setting: Setting, device: torch.device, side: int) -> dict[str, Any]:
    """Bytes and operations of a step, and images/s if every operator ran at the GPU's limit."""
    found = limits(device)
    training = Training(setting, device, side)
    training()
    with Roofline(found) as roofline:
        training()
    size = setting.batch_size
    return {
        **found,
        "bytes_per_image": roofline.bytes / size,
        "operations_per_image": roofline.operations / size,
        "images_per_s_at_most_unfused": size / roofline.seconds,
        "images_per_s_at_most_by_operations": found["operations_per_s"]
        / (roofline.operations / size),
    }


def evaluation_s(device: torch.device, side: int, count: int) -> dict[str, float]:
    """Seconds in which ResNet-34 classifies `count` images, for two batch sizes.

    For small data sets `common.data.stream.eval_batch_size` takes 32, so that each of many ranks
    gets a share. 256 would suit one GPU alone.
    """
    model = build_model(ModelOptions(model="resnet34", stem="large"), 3, 5, side).to(device).eval()
    images = torch.randn(count, 3, side, side, device=device)
    with torch.inference_mode():
        return {
            str(size): 1 / rate(lambda size=size: list(map(model, images.split(size))), 1, device)  # type: ignore[misc]
            for size in (32, 256)
        }


def measure(device: torch.device, path: Path) -> None:
    """All settings once, and the roofline, to a file; on a CPU two settings with few images."""
    large = device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    side = 224 if large else 32
    settings = SETTINGS if large else {"bf16": Setting(16), "fp32": Setting(16, "fp32")}
    found: dict[str, Any] = {"published_images_per_s": PUBLISHED, "runs": {}}
    for name, setting in settings.items():
        found["runs"][name] = images_per_s(setting, device, side)
        write_json(path, found)
    found["roofline"] = least_time(Setting(256 if large else 16), device, side)
    write_json(path, found)
    found["evaluation_s"] = evaluation_s(device, side, 731 if large else 8)  # of flower_photos
    write_json(path, found)


if __name__ == "__main__":
    measure(torch.device(sys.argv[1]), Path(sys.argv[2]))
