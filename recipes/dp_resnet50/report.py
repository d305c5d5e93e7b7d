"""What the recipe reports about its GPUs and its weights."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from common import log
from common.terminal import mebibytes


class Utilization:
    """Share of time in which each GPU ran any kernel; nvidia-smi samples it twice a second.

    Source: NVIDIA, nvidia-smi, "utilization.gpu".
    """

    def __init__(self, devices: list[torch.device]) -> None:
        gpus = [device for device in devices if device.type == "cuda"]
        self._uuids = [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]
        self._sampler, self._said = None, tempfile.TemporaryFile("w+")  # noqa: SIM115 - read in stop()
        if gpus and shutil.which("nvidia-smi"):
            self._sampler = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--query-gpu=uuid,utilization.gpu",
                    "--format=csv,noheader,nounits",
                    "--loop-ms=500",
                ],
                stdout=self._said,
                stderr=subprocess.DEVNULL,
            )

    def stop(self) -> list[float | None]:
        """Stop sampling; returns the mean of each GPU [%], None for a GPU without a sample."""
        if self._sampler is None:
            return [None] * len(self._uuids)
        self._sampler.terminate()
        self._sampler.wait()
        self._said.seek(0)
        samples: dict[str, list[float]] = {uuid: [] for uuid in self._uuids}
        for line in self._said:
            uuid, _, percent = line.partition(", ")
            if uuid in samples and percent.strip().isdigit():
                samples[uuid].append(float(percent))
        return [sum(s) / len(s) if s else None for s in samples.values()]


def show_gpus(devices: list[torch.device], utilization: list[float | None]) -> None:
    """Log peak memory and utilization [%] of each GPU; on a CPU, `utilization` is empty."""
    for gpu, percent in zip(devices, utilization, strict=False):
        peak = mebibytes(torch.cuda.max_memory_allocated(gpu))
        share = "not sampled" if percent is None else f"{percent:.0f} %"
        log.info(f"  {gpu}: peak memory {peak}, utilisation {share}")


def show_inference(plain: nn.Module, model: nn.Module, images: Tensor, path: Path) -> None:
    """Load the saved weights into `plain` on a CPU, and compare its predictions with `model`'s."""
    plain.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    with torch.inference_mode():
        ours = plain.eval()(images.cpu().float()).argmax(1)
        theirs = model.eval()(images).argmax(1).cpu()
    same = int((ours == theirs).sum())
    log.info(f"{path.name} in a plain model on a CPU: {same} of {len(ours)} predictions the same")
