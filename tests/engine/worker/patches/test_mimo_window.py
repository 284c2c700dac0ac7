"""A token of MiMo-V2-Flash attends to itself and to `sliding_window_size` tokens before it."""

import engine.worker  # noqa: F401  # before MLX

from engine.worker.patches import mimo_window  # isort: skip
from mlx_vlm.models.mimo_v2_flash.config import ModelConfig

from tests.support.families import FAMILIES
from tests.support.families.family import WINDOW

CONFIG = FAMILIES["mimo_v2_flash"].config


def test_the_window_contains_the_token_itself():
    mimo_window.install()
    assert ModelConfig.from_dict(CONFIG).sliding_window_size == WINDOW + 1


def test_the_patch_is_still_needed():
    made = ModelConfig.from_dict(CONFIG)
    mimo_window._library_init(
        made, **{name: getattr(made, name) for name in vars(made)} | {"sliding_window_size": WINDOW}
    )
    assert made.sliding_window_size == WINDOW
