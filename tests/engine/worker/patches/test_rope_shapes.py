"""The kernel of given cosines gets those of its tokens alone; a family's number of rope positions is told right."""

from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.models import rope_utils

from engine.worker.language_model import LanguageModel
from engine.worker.patches import families, rope_shapes
from tests.support.families import FAMILIES
from tests.support.zoo import new_module

HEADS = mx.random.normal((2, 4, 3, 16), key=mx.random.key(0))


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch):
    """Let the library find a kernel that, like Metal's, takes any shapes; this one turns nothing."""
    families.correct()
    monkeypatch.setattr(rope_utils, "_HAS_METAL", True)
    monkeypatch.setattr(rope_utils, "_compiled_rotary_apply", lambda *of: lambda q, k, *others: (q, k))


def rotated(cos: mx.array) -> mx.array:
    turned: Any = rope_utils.apply_rotary_pos_emb_even_odd(HEADS, HEADS, cos, mx.zeros_like(cos), cos_layout="full")
    return turned[0]


def test_cosines_of_the_tokens_go_to_the_kernel():
    assert mx.array_equal(rotated(mx.full((2, 3, 16), 2.0)), HEADS)


def test_cosines_for_all_rows_go_to_the_operations_that_broadcast_them():
    assert mx.array_equal(rotated(mx.full((1, 3, 16), 2.0)), 2 * HEADS)


def test_cosines_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="broadcast"):
        rotated(mx.full((3, 2, 16), 2.0))


def test_a_family_with_one_position_per_token_is_told_by_its_error():
    assert not LanguageModel(new_module(FAMILIES["ernie4_5_moe_vl"].config).language_model).explicit_positions


def test_the_library_still_gives_the_kernel_any_cosines():
    cos: Any = mx.zeros((3, 2, 16))
    assert rope_shapes._library(HEADS, HEADS, cos, cos, pairing="even_odd") is not None
