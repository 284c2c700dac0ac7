"""Families that only mlx_lm implements are loaded as those of mlx_vlm; test_families.py runs them."""

import subprocess
import sys

import engine.worker  # noqa: F401  # before MLX

import mlx_vlm.models.cache  # isort: skip
import pytest
from mlx_vlm.models.cache import make_prompt_cache

from engine.worker import mlx_lm_families
from tests.support.families import FAMILIES
from tests.support.zoo import new_module


@pytest.mark.parametrize("family", mlx_lm_families.FAMILIES)
def test_their_caches_are_those_of_mlx_vlm(family: str):
    layers = make_prompt_cache(new_module(FAMILIES[family].config).language_model)
    assert {type(layer).__module__ for layer in layers} == {mlx_vlm.models.cache.__name__}


def test_mlx_vlm_still_has_no_module_of_them():
    """When this fails, remove the family from the table."""
    names = ", ".join(f"'mlx_vlm.models.{family}'" for family in mlx_lm_families.FAMILIES)
    code = f"from importlib.util import find_spec; print([name for name in ({names},) if find_spec(name)])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
