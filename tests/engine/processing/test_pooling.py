"""Which pooling a checkpoint asks for."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EmbeddingConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.pooling import choose_pooling

AUTO = EmbeddingConfig()


def checkpoint(path: Path, pooling: dict[str, Any]) -> Path:
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return path


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({}, "last"),
    ],
)
def test_the_pooling_is_read_from_the_checkpoint(tmp_path, pooling, expected):
    assert choose_pooling(AUTO, checkpoint(tmp_path, pooling)) == expected


def test_a_checkpoint_without_a_pooling_setting_uses_the_last_token():
    assert choose_pooling(AUTO, DEMO_MODEL) == "last"


def test_the_configured_pooling_overrides_the_checkpoint(tmp_path):
    model = checkpoint(tmp_path, {"pooling_mode_cls_token": True})
    assert choose_pooling(EmbeddingConfig(pooling="mean"), model) == "mean"


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_cls_token": True}, "cls_token"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean_tokens and max_tokens"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_another_pooling_is_refused_by_name(tmp_path, pooling, named):
    with pytest.raises(EngineFailed, match=named):
        choose_pooling(AUTO, checkpoint(tmp_path, pooling))


def test_layers_behind_the_pooling_are_refused(tmp_path):
    (tmp_path / "2_Dense").mkdir()
    with pytest.raises(EngineFailed, match="2_Dense"):
        choose_pooling(AUTO, tmp_path)
