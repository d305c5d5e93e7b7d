"""Randomness, and what else decides the bits of a result."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import log
from common.kernels import choose_kernels, warm_up


def set_determinism(*, deterministic: bool, portable: bool, cpu_threads: int, tf32: bool) -> None:
    """Choose the kernels and thread counts that decide a result's bits; call before any operation.

    Args:
        deterministic: raise an error for an operation that has no deterministic kernel.
        portable: on a CPU, compute with kernels that every x86-64 CPU with AVX2 has.
        cpu_threads: threads of an operation on a CPU. They decide how sums are cut, so this is an
            option and never the machine's number of cores.
        tf32: let a GPU round the factors of fp32 products to 10 bits of mantissa.

    Source: PyTorch, "Reproducibility" and "Numerical accuracy".
    """
    if news := choose_kernels(portable=portable):
        log.warning(news)
    if cpu_threads > 1:
        warm_up()
    torch.set_num_threads(cpu_threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # --compile: or its compiler times kernels and takes the fastest.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    # The same as use_deterministic_algorithms(), which also imports the compiler (torch 2.15).
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Filling new memory with NaN is a debugging aid that changes no correct kernel's result, and
    # took 12 % of an LSTM's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def mix(*parts: int) -> int:
    """One 64-bit seed from several non-negative numbers; similar inputs give unrelated seeds.

    Source: NumPy's SeedSequence. It pads with zeros, so the count keeps (1,) and (1, 0) apart.
    """
    return int(np.random.SeedSequence([len(parts), *parts]).generate_state(1, np.uint64)[0])


def seed_everything(*parts: int) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices) from `parts`."""
    torch.manual_seed(mix(*parts))
    seed_cpu(mix(*parts))


def seed_cpu(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, fast enough for every sample."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_torch(device: torch.device, *parts: int) -> None:
    """Seed only the generator of `device`, which is fast enough for every step.

    `torch.manual_seed` takes 1 ms: it formats a traceback for each backend not yet initialized.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(mix(*parts))
    else:
        torch.default_generator.manual_seed(mix(*parts))


_lent: list[dict[str, Any]] = []


@contextmanager
def lent_generators() -> Iterator[None]:
    """The block may seed and use this process's generators; meanwhile their state is as before."""
    _lent.append(rng_state())
    try:
        yield
    finally:
        set_rng_state(_lent[-1])
        _lent.pop()


def rng_state() -> dict[str, Any]:
    """This process's generator states, as values that `torch.load(weights_only=True)` loads."""
    if _lent:
        return _lent[0]
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "python": (version, list(internal), gauss_next),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def choose_precision(asked: str, device: torch.device) -> str:
    """A `--precision` without auto: bf16 on GPUs that compute in it, fp32 elsewhere."""
    if asked != "auto":
        return asked
    ampere = (8, 0)  # older GPUs have no units for bf16
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= ampere
    return "bf16" if fast else "fp32"


class LossScaler(torch.amp.GradScaler):
    """torch's, which also notes what is scaled before the first step is counted."""

    noted: list[Tensor] | None = None

    def scale(self, outputs: Any) -> Any:
        """The loss, scaled if that is enabled."""
        if self.noted is not None and isinstance(outputs, Tensor):
            self.noted.append(outputs.detach())
        return super().scale(outputs)


def mixed_precision(
    precision: str, device: torch.device
) -> tuple[torch.dtype, torch.autocast, LossScaler]:
    """The parameters' dtype, the autocast context and the loss scaler for a `--precision`.

    Source: PyTorch, "Automatic Mixed Precision".
    """
    precision = choose_precision(precision, device)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return (
        torch.float64 if precision == "fp64" else torch.float32,
        torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None),
        LossScaler(device.type, enabled=precision == "fp16"),
    )
