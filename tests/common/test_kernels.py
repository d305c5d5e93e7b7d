"""Which kernels a process computes with, and what it says of them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common import kernels, seeds
from common.fingerprint import digest, fingerprint, unlike
from common.kernels import PORTABLE, bits_hold_on, choose_kernels
from common.seeds import set_determinism
from tests.helpers.commands import Recipe, clean_env
from tests.helpers.pool import Pool, call_main

CPU = torch.device("cpu")

_STORM = """
import os, sys, torch
from common.seeds import set_determinism
torch.set_num_threads(1)
values = torch.arange(1, 200_001).float() / 1e4
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        set_determinism(deterministic=False, portable=False, cpu_threads=4, tf32=False)
        first = {name: getattr(torch, name)(values) for name in ("sqrt", "exp", "log", "sin")}
        same = all(torch.equal(one, getattr(torch, name)(values)) for name, one in first.items())
        os._exit(not same)
    assert os.wait()[1] == 0, "the first call of a process computed other numbers"
"""


def python(code: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run in a fresh process: kernels are chosen once."""
    old_driver = "ignore:CUDA initialization"  # that of the machine: no test here uses it
    command = [sys.executable, "-W", "error", "-W", old_driver, "-c", code, *arguments]
    return subprocess.run(command, env={**clean_env(), **env}, capture_output=True, text=True)


def need_avx2() -> None:
    if not torch.cpu._is_avx2_supported():
        pytest.skip("needs a CPU with AVX2")


def test_an_environment_of_other_kernels_is_replaced_and_said(recipe: Recipe) -> None:
    need_avx2()
    env = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    options = ("--nproc", "1", "--max-steps", "1")
    usual = recipe("ddp_launch", *options, folder="usual").assert_ok()
    forced = recipe("ddp_launch", *options, folder="forced", env=env).assert_ok()
    said = "warning: ATEN_CPU_CAPABILITY=default is replaced by avx2 (--no-portable keeps the env"
    assert said in forced.stderr + forced.stdout
    assert "MKL_CBWR" not in forced.stderr + forced.stdout
    assert forced.sha == usual.sha
    kept = recipe("ddp_launch", "--no-portable", *options, folder="kept", env=env).assert_ok()
    assert kept.summary["bits_hold_on"] == "this kind of CPU (DEFAULT)"
    assert kept.sha != usual.sha


def test_kernels_that_were_chosen_before_are_said() -> None:
    need_avx2()
    code = (
        "import torch; torch.ones(9).exp(); from common import kernels\n"
        "print(kernels.choose_kernels(portable=True))\n"
        "print(kernels.bits_hold_on(torch.device('cpu'), portable=True))"
    )
    early = python(code, ATEN_CPU_CAPABILITY="default")
    assert early.stdout.startswith("kernels were chosen before the run began, by a tensor"), early
    assert early.stdout.endswith("this kind of CPU (DEFAULT)\n")


def test_a_cpu_without_avx2_trains_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    for name in PORTABLE:
        monkeypatch.delenv(name)
    assert choose_kernels(portable=True) == ""
    assert not PORTABLE.keys() & os.environ.keys()
    assert bits_hold_on(CPU, portable=True) == "this kind of CPU (DEFAULT)"


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ("--precision bf16", "any x86-64 CPU with AVX2"),
        ("--precision fp16", "this kind of CPU (AVX2)"),
    ],
)
def test_a_run_says_where_its_bits_hold(
    pool: Pool, tmp_path: Path, options: str, held: str
) -> None:
    need_avx2()
    words = f"{options} --nproc 1 --max-steps 1 --output-dir {tmp_path}".split()
    ((status, said, errors),) = pool.run(call_main, 1, "ddp_launch", words)
    assert status == 0, errors
    assert f"the same bits on {held}" in said
    assert json.loads((tmp_path / "summary.json").read_text())["bits_hold_on"] == held


def test_onednn_multiplies_like_torch() -> None:
    """Every form of a product, with its gradients; and what oneDNN has not is left to torch."""
    need_avx2()
    assert kernels._overrides, "tests/conftest.py chose portable kernels"

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    products: dict[str, Callable[..., Tensor]] = {
        "mm": lambda a, b, _: a @ b,
        "transposed": lambda a, b, _: b.t() @ a.t(),
        "addmm": lambda a, b, c: torch.addmm(c, a, b),
        "addmm of a matrix": lambda a, b, c: torch.addmm(c.expand(7, 5), a, b),
        "scaled": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=3),
        "linear": lambda a, b, c: functional.linear(a[None], b.t(), c)[0],
        "an expanded bias": lambda a, b, c: functional.linear(a, b.t(), c[:1].expand(5)),
        "every second bias": lambda a, b, c: functional.linear(a, b.t(), c.repeat(2)[::2]),
        "overlapping rows": lambda a, b, c: a @ torch.cat([b.flatten()]).unfold(0, 5, 1)[:9],
        "overlapping weights": lambda a, b, c: functional.linear(
            a, torch.cat([b.flatten()]).unfold(0, 9, 1)[:5]
        ),
        "every second column": lambda a, b, _: a.repeat(1, 2)[:, ::2][:, :9] @ b,
        "one row": lambda a, b, _: a[:1] @ b,
        "none": lambda a, b, _: (a[:0] @ b).sum() + a[:, :0] @ b[:0],
    }
    for name, product in products.items():
        exact = [numbers(7, 9), numbers(9, 5), numbers(5)]
        for dtype, tolerance in (
            (torch.float32, 1e-5),
            (torch.float64, 1e-13),
            (torch.bfloat16, 0.1),
        ):
            results = []
            for given in (exact, [x.to(dtype) for x in exact]):
                leaves = [x.clone().requires_grad_() for x in given]
                output = product(*leaves)
                output.square().sum().backward()
                results.append([output, *(x.grad for x in leaves if x.grad is not None)])
            for expected, found in zip(*results, strict=True):
                assert found.dtype == dtype, name
                scale = expected.abs().max() if expected.numel() else 1
                assert (found.double() - expected).abs().le(tolerance * scale).all(), name
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(3, 4) @ torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ones(3, 4) @ torch.ones(4, 3).double()


def test_the_first_call_of_several_threads_computes_what_the_second_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MKL's race: others saw it in 5 of 100 processes on an Intel CPU, without warm_up().

    On an AMD CPU it was not seen in 2,000. So it is also tested that warm_up() runs.
    """
    warmed: list[int] = []
    monkeypatch.setattr(seeds, "warm_up", lambda: warmed.append(torch.get_num_threads()))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: warmed.append(0))
    set_determinism(deterministic=False, portable=True, cpu_threads=2, tf32=False)
    assert warmed == [1, 0], "before there is a second thread"
    done = python(_STORM, "60", OMP_WAIT_POLICY="passive")
    assert done.returncode == 0, done.stderr


def test_a_fingerprint_is_of_the_arithmetic_and_of_nothing_else() -> None:
    before = torch.get_rng_state()
    first = fingerprint(CPU)
    assert torch.equal(torch.get_rng_state(), before), "it draws from its own generator"
    with torch.no_grad():
        assert fingerprint(CPU) == first
    assert digest(dict(reversed(first.items()))) == digest(first)
    other = {**first, "convolution": "0", "of a newer version": "1"}
    assert unlike(first, other) == ["convolution"]
    assert digest(other) != digest(first)


def test_a_fingerprint_names_the_kernels_that_differ() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("needs a CPU with AVX-512")
    code = "import json, torch; from common.fingerprint import fingerprint; "
    code += "torch.set_num_threads(1); print(json.dumps(fingerprint(torch.device('cpu'))))"
    names = unlike(fingerprint(CPU), json.loads(python(code).stdout))
    assert {"matrix product fp64", "convolution", "attention"} <= {*names}
    assert "random numbers" not in names
