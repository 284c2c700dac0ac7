"""The bytes of attention scores are known, although the short probes of a whole forward do not show them."""

import platform

import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.worker import warm_up
from engine.worker.attention_costs import with_attention
from engine.worker.model_runner import load_runner
from engine.worker.patches.attention_cpu import BLOCK_QUERIES
from tests.support.families import FAMILIES
from tests.support.zoo import make

NUM_HEADS = 4
FLOAT_BYTES = 4


@pytest.mark.parametrize(("family", "is_patched"), [("qwen3_5", True), ("gemma2", False)])
def test_scores_count_whatever_the_other_layers_take(family, is_patched, tmp_path):
    runner = load_runner(EngineConfig(model=str(make(tmp_path, FAMILIES[family])), device="cpu"), lambda progress: None)
    _, snapshot = warm_up.time_steps(runner, 1)
    assert snapshot is not None
    lm = runner._language_model.lm
    found = with_attention(MemoryCosts(), lm, snapshot, NUM_HEADS)
    assert NUM_HEADS * FLOAT_BYTES <= found.pair_bytes <= 4 * NUM_HEADS * FLOAT_BYTES
    is_blocked = is_patched and platform.machine() in ("x86_64", "AMD64")
    assert found.max_queries == (BLOCK_QUERIES if is_blocked else 2**31)
    assert with_attention(MemoryCosts(pair_bytes=1e6), lm, snapshot, NUM_HEADS).pair_bytes == 1e6
