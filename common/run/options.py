"""The options of a run, and which of them decide its numbers."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

MAY_DIFFER_BY_HOST = {"output_dir", "data_path", "weights", "resume"}

# Options that change where, how fast or how long a run goes, but no number in it. The data's
# fingerprint stands for its path, and the resolved batch for the two ways to give it.
FREE = {
    "output_dir",
    "resume",
    "snapshot_every",
    "keep_snapshots",
    "log_every",
    "epoch_weights",
    "max_steps",
    "num_workers",
    "loader",
    "pin_memory",
    "download",
    "verify_images",
    "data_path",
    "device",
    "backend",
    "timeout_s",
    "global_batch_size",
    "batch_size_per_rank",
    "lesson",
    "timeline",
    "memory_budget",
}


@dataclass(frozen=True)
class RunOptions:
    """Where the run goes, on what, and what it leaves."""

    output_dir: Path | None = None
    """Folder of the run. None: runs/NAME/UTC-TIME. The same folder again goes on with its run."""
    resume: Literal["auto", "never"] | Path = "auto"
    """Where to begin. auto: at the newest sound snapshot in --output-dir; never: at the start; or a
    snapshot file."""
    snapshot_every: int = 0
    """Steps between two snapshots [steps], besides the one at each epoch's end; 0: only that."""
    keep_snapshots: int = 3
    """Snapshots to keep, the newest ones [files]."""
    log_every: int = 10
    """Steps between two lines of metrics [steps]; the loss is averaged over ranks."""
    epoch_weights: bool = False
    """Keep the weights after each epoch, in weights/."""
    seed: int = 0
    """Seed of the weights, the data order, the augmentation and the split."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: a GPU where there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the process group. auto: nccl on GPUs, gloo on CPUs. With gloo several ranks can
    share one GPU."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Arithmetic of the model; bf16 and fp16 are mixed precision, fp16 with a loss scaler."""
    deterministic: bool = True
    """Use deterministic kernels only: the same command gives the same bits."""
    tf32: bool = False
    """Faster fp32 products on GPUs, whose factors are rounded to 10 bits of mantissa (TF32)."""
    cpu_threads: int = 1
    """Threads of a CPU operation in each rank [threads]; another number gives other bits."""
    timeout_s: float = 600.0
    """Time after which a rank gives up waiting for the other ranks [s]."""

    @property
    def determinism(self) -> dict[str, Any]:
        """What `common.seeds.set_determinism` takes."""
        return {name: getattr(self, name) for name in ("deterministic", "cpu_threads", "tf32")}

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name, minimum in (
            ("snapshot_every", 0),
            ("keep_snapshots", 1),
            ("log_every", 1),
            ("seed", 0),
            ("cpu_threads", 1),
            ("timeout_s", 1),
        ):
            if not minimum <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {minimum}: {getattr(self, name)}"
                )


def flatten(config: Any) -> dict[str, Any]:
    """A config dataclass of option groups as one flat dict of JSON values."""
    flat: dict[str, Any] = {}
    for name, value in asdict(config).items():
        flat.update(value if isinstance(value, dict) else {name: value})
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}
    return {k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}


def decisive(options: dict[str, Any]) -> dict[str, Any]:
    """The options that decide the numbers."""
    return {name: value for name, value in options.items() if name not in FREE}
