"""The options of a run."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from common.identity import Options
from common.option_rules import may_change, refuse_below

MAY_DIFFER_BY_HOST = {"output_dir", "data_path", "data_local", "weights", "resume"}


@dataclass(frozen=True)
class RunOptions:
    """Where the run goes, on what, and what it leaves."""

    output_dir: Path | None = may_change(None)
    """Folder of the run. None: runs/NAME/UTC-TIME. The run continues if the folder holds it."""
    resume: Literal["auto", "never"] | Path = may_change("auto")
    """Where to begin: auto, never, or a snapshot file.
    auto: at the newest intact snapshot in --output-dir. never: at the start."""
    snapshot_every: int = may_change(0)
    """Steps between two snapshots [steps]; 0: none. One more is written after each epoch."""
    keep_snapshots: int | None = may_change(None)
    """Snapshots to keep, the newest ones [files]. None: 3, and 1 after all epochs."""
    log_every: int = may_change(10)
    """Steps between two lines of metrics [steps]; the loss is averaged over ranks."""
    profile: int = may_change(0)
    """Steps to record with torch's profiler, from the fourth of this start (ProfilerStep#3) to the
    epoch's last one; 0: none. Each rank writes profile/rank_N.json, which ui.perfetto.dev opens,
    and a table of operations."""
    epoch_weights: bool = may_change(False)
    """Keep the weights after each epoch, in weights/."""
    best_by: str | None = may_change(None)
    """Metric that chooses the epoch whose weights are kept in best.pt, or none for no such file.
    Of a metric with loss or error in its name the lowest is the best, else the highest. After a
    change, only later epochs count. Where writing takes long, not every better epoch is written at
    once; the best one is at the end or at a stop. None: val_accuracy, else val_loss, else none."""
    patience: int | None = may_change(None)
    """Finish early, after so many epochs in a row that were not the best by --best-by [epochs].
    None: train all --epochs."""
    seed: int = 0
    """Seed of the weights, the data order, the augmentation and the split."""
    device: Literal["auto", "cpu", "cuda"] = may_change("auto")
    """Device to train on. auto: a GPU if there is one."""
    backend: Literal["auto", "gloo", "nccl"] = may_change("auto")
    """Backend of the process group. auto: nccl on GPUs, gloo on CPUs.
    With gloo, several ranks can share one GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """Arithmetic of the model. bf16 and fp16 are mixed precision; fp16 uses a loss scaler.
    auto: bf16 on GPUs that compute in it (NVIDIA's of compute capability 8.0 or newer), and there
    ResNets with --channels-last; fp32 elsewhere.
    On a CPU, bf16 without --no-portable is many times slower than fp32."""
    deterministic: bool = True
    """Use deterministic kernels only: the same command gives the same bits."""
    portable: bool = True
    """On a CPU, use kernels that give the same bits on every x86-64 CPU with AVX2.
    --no-portable uses the CPU's best kernels: in fp32 1.2 to 1.7 times as fast with AVX-512."""
    tf32: bool = False
    """Faster fp32 products on GPUs, with factors rounded to 10 bits of mantissa (TF32)."""
    cpu_threads: int = 1
    """Threads per rank for an operation on a CPU [threads]; another number gives other bits."""
    timeout_s: float = may_change(600.0)
    """Time after which a rank gives up waiting for the other ranks, or for a batch [s]."""

    @property
    def snapshots_on_the_way(self) -> int:
        """How many snapshots a run keeps that goes on [files]."""
        return self.keep_snapshots or 3

    @property
    def determinism(self) -> dict[str, Any]:
        """The arguments of `common.seeds.set_determinism`."""
        names = ("deterministic", "portable", "cpu_threads", "tf32")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        refuse_below(self, snapshot_every=0, keep_snapshots=1, log_every=1, profile=0, seed=0)
        refuse_below(self, cpu_threads=1, timeout_s=1, patience=1)
        if not re.match("(none|train_loss|val_.+)$", self.best_by or "none"):
            raise ValueError(
                f"--best-by {self.best_by}: give train_loss, none, or a metric of the validation, "
                f"whose name begins with val_, such as val_{self.best_by}"
            )
        if self.patience and self.best_by == "none":
            raise ValueError("--patience needs a metric that chooses the best epoch: --best-by")
        if self.cpu_threads > 1024:
            raise ValueError(f"--cpu-threads must be from 1 to 1024, got {self.cpu_threads}")
        if self.timeout_s > 10**7:
            raise ValueError(f"--timeout-s must be from 1 to {10**7}, got {self.timeout_s}")


def flatten(config: Any) -> Options:
    """A config dataclass of option groups as one flat dict of JSON values."""
    flat = {name: value for group in asdict(config).values() for name, value in group.items()}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}
    return {k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}
