"""Change a module when it is imported; for the sitecustomize.py files of benchmarks and tests."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class OnImport:
    """Calls `change(module)` when the module `name` has loaded, once."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        """The module's own spec, with a loader that calls `change` after it has loaded."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            self.change(module)

        loader.exec_module = load_and_change
        return spec
