"""One process per stage: torch.distributed.pipelining, its warm-up, evaluation and timeline."""

import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common.errors import InputError
from common.figure import save_figure
from common.group import process_group
from common.group.collectives import gather_to_rank_0
from common.group.devices import synchronize
from common.training.ddp import left_as_it_was
from common.writing import write_json


def make_mesh(device: torch.device, replicas: int, stages: int) -> DeviceMesh:
    """All ranks as `data` x `stage`: ranks 0 to stages - 1 are the first pipeline.

    Raises:
        InputError: gloo on GPUs.
    """
    if device.type == "cuda" and dist.get_backend() == "gloo":
        raise InputError(
            "stages on GPUs need NCCL and one GPU per stage: leave out --backend gloo, or give "
            "--device cpu"
        )
    return process_group.make_mesh(device, (replicas, stages), ("data", "stage"))


class TimedStage(PipelineStage):
    """A stage that can record when it works."""

    work: list[dict[str, Any]] | None = None
    """Forward and backward passes, with times in seconds; None: nothing is recorded."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward; its inputs have already arrived."""
        return self._noted("forward", fwd_chunk_id, super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch backward."""
        return self._noted("backward", bwd_chunk_id, super().backward_one_chunk, args, kwargs)

    def _noted(self, kind: str, chunk: int, method: Any, args: Any, kwargs: Any) -> Any:
        if self.work is None:
            return method(chunk, *args, **kwargs)
        synchronize(self.device)
        start_s = time.monotonic()
        result = method(chunk, *args, **kwargs)
        synchronize(self.device)
        self.work.append(
            {
                "stage": self.stage_index,
                "kind": kind,
                "micro_batch": chunk,
                "start_s": start_s,
                "end_s": time.monotonic(),
            }
        )
        return result


class Pipeline(nn.Module):
    """This process's stage of the pipeline, and its schedule.

    Args:
        stages: all stages; those of other processes are moved to `meta`.
        schedule: gpipe or 1f1b.
        micro_batches: per batch.
        device: of this process.
        mesh: see `make_mesh`.
    """

    def __init__(
        self,
        stages: list[nn.Sequential],
        schedule: str,
        micro_batches: int,
        device: torch.device,
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        self.micro_batches, self.begin_s = micro_batches, 0.0
        self.index, self.count = mesh.get_local_rank("stage"), len(stages)
        for index, stage in enumerate(stages):
            stage.to(device if index == self.index else "meta")
        self.stage, self.device = stages[self.index], device
        self.group = mesh.get_group("stage")
        wrapped: nn.Module = self.stage
        if mesh.size(0) > 1:  # averages this stage's gradients over the copies of the pipeline
            wrapped = DistributedDataParallel(
                self.stage,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=mesh.get_group("data"),
            )
        self.timed = TimedStage(wrapped, self.index, self.count, device, group=self.group)
        # torch refuses 1F1B with one micro-batch. GPipe does the same then.
        kind = Schedule1F1B if schedule == "1f1b" and micro_batches > 1 else ScheduleGPipe
        try:
            self.schedule = kind(self.timed, micro_batches, loss_fn=cross_entropy)
        except ValueError as error:  # torch 2.10 refuses fewer micro-batches than stages
            raise InputError(f"--micro-batches, torch {torch.__version__}: {error}") from error

    def backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute this stage's gradients by the schedule.

        Returns:
            A scalar whose mean over the ranks is the loss. It is 0 except on last stages.
        """
        losses: list[Tensor] = []
        if self.index == 0:
            self.schedule.step(inputs.to(self.device).contiguous())
        elif self.index < self.count - 1:
            self.schedule.step()
        else:
            self.schedule.step(target=labels.to(self.device), losses=losses)
        return torch.stack(losses).mean() * self.count if losses else inputs.new_zeros(())

    def warm_up(self, sample: Tensor, batch_size: int) -> None:
        """Run one step and discard its result.

        In the first step of a process, torch finds the shapes between stages and calls DDP's hooks
        for that. Without a warm-up, the first step after a resume would therefore have other bits
        than the same step of an uninterrupted run.

        Raises:
            InputError: the stage cannot train on such a micro-batch.
        """
        with left_as_it_was(self.stage):
            inputs = sample.expand(batch_size, *sample.shape)
            labels = torch.zeros(batch_size, dtype=torch.int64)
            try:
                self.backward(inputs, labels)
            except (RuntimeError, ValueError) as error:
                if "more than 1 value per channel" not in str(error.__cause__ or error):
                    raise
                raise InputError(
                    "BatchNorm needs more than one sample per micro-batch: give fewer "
                    f"--micro-batches than {self.micro_batches}, or --norm group"
                ) from error
        if isinstance(self.timed.submod, DistributedDataParallel):
            self.timed.submod.reducer._rebuild_buckets()

    def forward(self, inputs: Tensor) -> Tensor | None:
        """Send a batch of any size through the stages; logits on the last one, None elsewhere."""
        if self.index > 0:
            before = dist.get_global_rank(self.group, self.index - 1)
            header: list[Any] = [None]
            dist.recv_object_list(header, src=before)
            inputs = torch.empty(header[0], dtype=inputs.dtype, device=self.device)
            dist.recv(inputs, src=before)
        outputs: Tensor = self.stage(inputs)
        if self.index == self.count - 1:
            return outputs
        after = dist.get_global_rank(self.group, self.index + 1)
        dist.send_object_list([tuple(outputs.shape)], dst=after)
        dist.send(outputs, dst=after)
        return None

    def note_work(self, wanted: bool) -> None:
        """Begin to record when the stage works, at the same moment on every rank."""
        if wanted:
            dist.barrier()
            self.timed.work, self.begin_s = [], time.monotonic()

    def save_timeline(self, folder: Path) -> None:
        """Write timeline.json and timeline.png on rank 0; every rank calls it.

        Processes of one host share a clock. On each host, time 0 is the end of the barrier.
        """
        ranks = gather_to_rank_0((socket.gethostname(), self.begin_s, self.timed.work or []))
        began_s: dict[str, float] = {}
        for host, begin_s, _ in ranks:
            began_s[host] = min(begin_s, began_s.get(host, begin_s))
        work = [
            {**entry, **{k: entry[k] - began_s[host] for k in ("start_s", "end_s")}}
            for host, _, noted in ranks
            for entry in noted
        ]
        if work:
            write_json(folder / "timeline.json", work)
            save_figure(folder / "timeline.png", partial(plot_timeline, work))


def plot_timeline(work: list[dict[str, Any]], axes: Any) -> None:
    """When each stage worked; copies of the pipeline are drawn on top of each other."""
    for entry in work:
        start_ms, end_ms = 1e3 * entry["start_s"], 1e3 * entry["end_s"]
        colour = "tab:blue" if entry["kind"] == "forward" else "tab:orange"
        axes.barh(entry["stage"], end_ms - start_ms, left=start_ms, color=colour, edgecolor="white")
        axes.text(
            (start_ms + end_ms) / 2,
            entry["stage"],
            str(entry["micro_batch"]),
            ha="center",
            va="center",
            color="white",
        )
    axes.set(
        yticks=sorted({entry["stage"] for entry in work}),
        ylabel="stage",
        xlabel="time since the step began [ms]",
        title="forward (blue) and backward (orange), by micro-batch",
    )
    axes.invert_yaxis()
