"""What surrounds the tests, GPUs, packages and pytest's plugins, does not change what they find."""

import sys

from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import OLD_DRIVER, library

TEST = """
import warnings
import pytest
import torch
from common.launch.start import LaunchOptions
from tests.helpers.commands import clean_env


def warn(module):
    warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module)


def test_here(request):
    assert not torch.cuda.is_available()
    torch.ones((), requires_grad=True).mul(2).backward()
    assert LaunchOptions().processes("auto") == 2
    assert request.config.pluginmanager.has_plugin("timeout")
    assert clean_env({"PYTHONPATH": "mine"})["PYTHONPATH"].startswith("mine:PACKAGES:ROOT")
    warn("torch.jit._script")
    with pytest.raises(DeprecationWarning):
        warn("common.run.loop")
"""


def test_gpus_plugins_and_old_libraries_around_the_tests_do_not_matter(recipe: Recipe) -> None:
    packages = recipe.tmp_path / "packages"
    plugin = packages / "foreign-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Name: foreign\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[pytest11]\nforeign = foreign\n")
    (packages / "foreign.py").write_text("raise SystemExit('a plugin of someone else')")
    test = recipe.tmp_path / "test_it.py"
    test.write_text(TEST.replace("PACKAGES", str(packages)).replace("ROOT", str(ROOT)))
    command = f"-m pytest -q -n 0 -c {ROOT}/pyproject.toml -p tests.conftest -p no:cacheprovider"
    driver = library(recipe.tmp_path / "driver", "libcuda.so.1", OLD_DRIVER)
    env = {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": f"{packages}:{ROOT}"}
    env["CUDA_VISIBLE_DEVICES"] = "0"
    done = recipe.finish(recipe.start(sys.executable, *command.split(), test, env=env), test)
    assert done.status == 0, done.stdout + done.stderr
