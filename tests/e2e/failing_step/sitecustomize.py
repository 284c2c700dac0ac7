"""A fault for servers whose PYTHONPATH has this folder: the decode step after a prompt with FAILING_SEED fails, once.

Python imports this module in every process of such a server; only the engine's imports the model runner.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FAILING_SEED = 500_500
RUNNER = "engine.worker.model_runner"


class FailingStep(MetaPathFinder, Loader):
    """Imports the model runner, and makes its step fail."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != RUNNER or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        runner: Any = module.MLXRunner
        prefill, decode, failing = runner.prefill, runner.decode, []

        def failing_prefill(self: Any, rows: Any, max_tokens: int) -> Any:
            failing[:] = [row for row in rows if row.spec.sampling.seed == FAILING_SEED] or failing
            return prefill(self, rows, max_tokens)

        def failing_decode(self: Any, *args: Any) -> Any:
            if failing:
                failing.clear()
                raise RuntimeError("this step fails because a test wants it to")
            return decode(self, *args)

        runner.prefill, runner.decode = failing_prefill, failing_decode


sys.meta_path.insert(0, FailingStep())
