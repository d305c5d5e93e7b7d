"""Which kernels a CPU computes with: those that are the same on every x86-64 CPU, or its own best.

A library chooses its kernels by the instruction set and the vendor of the CPU, and each kernel cuts
its sums in another way. docs/same-numbers.md lists what portable kernels do not reach.
"""

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # convolutions, recurrent networks, bf16
    "MKL_CBWR": "COMPATIBLE",  # linear algebra; with AVX2, Intel's and AMD's bits differ
}
"""Environment variable to its value for portable kernels; each is read at the first operation."""

_VECTOR_FUNCTIONS = (
    "acos asin atan cos erf erfc erfinv exp expm1 log log10 log1p log2 sin sqrt tan tanh"
)
"""What torch computes with MKL's vector library."""

_overrides: list[torch.library.Library] = []
"""Torch's own kernels come back when such a library is deleted."""


def choose_kernels(*, portable: bool) -> str:
    """Choose the kernels of this process and of those it starts; call before any operation.

    Args:
        portable: those that compute the same bits on every x86-64 CPU with AVX2.

    Returns:
        What the user must know of it; empty if nothing.
    """
    if not portable or not torch.cpu._is_avx2_supported():
        return ""
    replaced = [
        f"{name}={os.environ[name]} is replaced by {value}"
        for name, value in PORTABLE.items()
        if os.environ.get(name, value).lower() != value.lower()
    ]
    os.environ.update(PORTABLE)
    if not _overrides:
        _multiply_matrices_with_onednn()
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return (
            "kernels were chosen before the run began, by a tensor that is made while a module is "
            "imported: the bits hold on this kind of CPU only. Make the tensor in a function"
        )
    return f"{', '.join(replaced)} (--no-portable keeps the environment's)" if replaced else ""


def warm_up() -> None:
    """Let MKL's vector library choose its kernels before several threads call it.

    It chooses at each function's first call. If threads make that call at once, one of them may
    compute with a less accurate kernel, once (oneMKL 2024.2, PyTorch's issue 188792).
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype)  # one number: torch starts no thread for it
        for name in _VECTOR_FUNCTIONS.split():
            getattr(torch, name)(half)


def _multiply_matrices_with_onednn() -> None:
    """Replace torch's fp32 matrix products on CPUs, which MKL computes, in all of this process.

    MKL's portable kernels use SSE2 alone. oneDNN's for AVX2 know no vendor, and are faster
    (benchmarks/portable.py). Torch itself offers them for bf16, and for fp32 only where it compiles
    a model.
    """
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise  # x @ w.t() + bias

    def apart(a: Tensor) -> bool:
        # oneDNN refuses rows that overlap, as those of unfold().
        (rows, columns), (row, column) = a.shape, a.stride()
        return (column == 1 and row >= columns) or (row == 1 and column >= rows)

    def fits(a: Tensor, b: Tensor) -> bool:
        floats = a.dtype == b.dtype == torch.float32 and apart(a) and apart(b)
        return floats and a.shape[1] == b.shape[0] and a.numel() > 0 and b.numel() > 0

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if fits(a, b):
            return product(a, b.t(), None, "none", [], "")
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        same = c.shape == b.shape[1:] and c.dtype == a.dtype and beta == alpha == 1
        if fits(a, b) and same:
            return product(a, b.t(), c.contiguous(), "none", [], "")
        out = a.new_empty(a.shape[0], b.shape[1])
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel": as it should
        library.impl("mm", mm, "CPU")
        library.impl("addmm", addmm, "CPU")
    _overrides.append(library)


def bits_hold_on(device: torch.device, *, portable: bool) -> str:
    """The machines on which a run gives the same bits, in words, with the same stack and ranks.

    Args:
        device: that trains.
        portable: whether portable kernels were asked for, and compute all of it.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    if portable and capability == "AVX2":
        return "any x86-64 CPU with AVX2"
    return f"this kind of CPU ({capability})"
