"""HY V4's index chooses the best tokens whatever was computed before, and still needs the patch."""

import inspect

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_vlm.models.hy_v4.indexer import _partition_scores

from engine.worker.patches import hy_v4_index
from tests.support.families import FAMILIES
from tests.support.zoo import new_module


def test_the_choice_does_not_depend_on_the_lengths_before():
    hy_v4_index.install()
    lm = new_module(FAMILIES["hy_v4"].config).language_model
    indexer, sizes = lm.layers[0].self_attn.indexer, (lm.args.hidden_size, lm.args.q_lora_rank)

    def chosen(length: int) -> list[int]:
        x, low_rank = (mx.random.normal((1, length, size), key=mx.random.key(length)) for size in sizes)
        mask = mx.arange(length) <= mx.arange(length)[:, None]
        return sorted(np.array(indexer(x, low_rank, mask))[0, 0, -1].tolist())

    lengths = (17, 40, 64)
    assert [chosen(length) for length in lengths] == [chosen(length) for length in reversed(lengths)][::-1]


def test_the_library_still_compiles_the_choice_for_all_lengths():
    """When this fails, see whether the patch can go. To call it with a second length may end the process."""
    assert "mx.compile, shapeless=True" in inspect.getsource(_partition_scores.__wrapped__)
