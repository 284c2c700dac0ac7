"""Loads single tool call parsers of mlx-lm, without importing the package, which imports MLX."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def library_parser(name: str) -> Callable[[str, Any], Any]:
    """Return `parse_tool_call` of the module `name` in mlx_lm.tool_parsers, without importing mlx_lm."""
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "tool_parsers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"orchard_tool_parsers_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse_tool_call
