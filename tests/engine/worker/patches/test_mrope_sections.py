"""Sections of M-RoPE's frequencies are the library's, and a compiled call may have several of them."""

from functools import partial
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker.patches import mrope_sections

ANGLES = mx.random.normal((3, 2, 5, 16), key=mx.random.key(0))


@pytest.mark.parametrize("lengths", [[2, 3, 3], [8, 0, 0], [4, 2, 1]])
def test_each_frequency_has_the_value_of_its_axis(lengths: list[int]):
    assert mx.array_equal(mrope_sections.sections(ANGLES, lengths), mrope_sections._library(ANGLES, lengths))


def test_other_numbers_of_sections_are_refused():
    with pytest.raises(ValueError, match="3 sections"):
        mrope_sections.sections(ANGLES, [4, 4])


def test_each_layer_of_a_compiled_step_may_ask_for_them_and_the_librarys_may_not():
    def layers(angles: mx.array, split: Any = mrope_sections.sections) -> mx.array:
        cos, sin = 1.5 * mx.cos(angles), 1.5 * mx.sin(angles)
        return sum((split(x, [2, 3, 3]) for x in (cos, sin, cos, sin)), mx.zeros(()))

    assert mx.allclose(mx.compile(layers)(ANGLES), layers(ANGLES), atol=1e-6)
    with pytest.raises(IndexError):  # if it is not raised, the patch can go
        mx.compile(partial(layers, split=mrope_sections._library))(ANGLES)
