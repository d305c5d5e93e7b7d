"""The options of a run, and which of them decide its numbers."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

MAY_DIFFER_BY_HOST = {"output_dir", "data_path", "weights", "resume"}

# Options that change where, how fast or how long a run goes, but no number in it. The data's
# fingerprint stands for its path, and the resolved batch for the two ways to give it.
FREE = {
    "output_dir", "resume", "snapshot_every", "keep_snapshots", "log_every", "epoch_weights",
    "max_steps", "num_workers", "loader", "pin_memory", "download", "verify_images", "data_path",
    "device", "backend", "timeout_s", "global_batch_size", "batch_size_per_rank",
    "lesson", "timeline", "memory_budget",
}  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """Where the run goes, on what, and what it leaves."""

    output_dir: Path | None = None
    """Folder of the run. None: runs/NAME/UTC-TIME. The same folder again goes on with its run."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: the newest sound snapshot in --output-dir; never: none; or a snapshot file."""
    snapshot_every: int = 0
    """Write a snapshot every so many steps [steps]; 0 at the end of each epoch only."""
    keep_snapshots: int = 3
    """How many of the newest snapshots stay [files]."""
    log_every: int = 10
    """Write a line of metrics every so many steps [steps]; the loss is averaged over ranks."""
    epoch_weights: bool = False
    """Keep the weights of each epoch in weights/."""
    seed: int = 0
    """Of weights, data order, augmentation and split."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one, and says which."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on GPUs, gloo on CPUs. gloo lets several ranks share a GPU."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Of the arithmetic; bf16 and fp16 are mixed, fp16 with a loss scaler."""
    deterministic: bool = True
    """Deterministic kernels only: the same command gives the same bits."""
    tf32: bool = False
    """Let a GPU round the factors of fp32 products to 10 bits of mantissa: faster."""
    cpu_threads: int = 1
    """Threads of a CPU operation in each rank [threads]; another number gives other bits."""
    timeout_s: float = 600.0
    """How long a rank waits for its peers before it gives up [s]."""

    @property
    def determinism(self) -> dict[str, Any]:
        """What `common.seeds.set_determinism` takes."""
        return {name: getattr(self, name) for name in ("deterministic", "cpu_threads", "tf32")}

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name, minimum in (
            ("snapshot_every", 0), ("keep_snapshots", 1), ("log_every", 1), ("seed", 0),
            ("cpu_threads", 1), ("timeout_s", 1),
        ):  # fmt: skip
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


def as_arguments(config: Any, leave_out: set[str]) -> list[str]:
    """A config as the command line that gives it, for another recipe with the same groups."""
    arguments = []
    for name, value in flatten(config).items():
        option = name.replace("_", "-")
        if name in leave_out or value is None:
            continue
        if isinstance(value, list | tuple):
            arguments += [f"--{option}", *map(str, value)]
        elif isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments
