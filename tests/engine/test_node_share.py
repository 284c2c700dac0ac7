import os

import pytest

from engine import node_share
from engine.config import EngineConfig
from engine.gpus import VISIBLE
from engine.node_share import NodeShare
from engine.protocol import EngineFailed

DISK = {"prefix_cache": {"disk": {"path": "/cache", "max_gb": 10.0}, "fetch_port": 7000}}


def with_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(node_share, "cuda_gpus", lambda device: names)
    monkeypatch.setenv(VISIBLE, "7")


def test_the_only_engine_has_everything(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, "0", "1")
    config = EngineConfig.model_validate(DISK)
    NodeShare().take_gpu("auto")
    assert NodeShare().of(config) is config and os.environ[VISIBLE] == "7"


def test_each_engine_sees_its_own_gpu_with_all_of_its_memory(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, "3", "GPU-5a1b")
    NodeShare(1, 2).take_gpu("auto")
    assert os.environ[VISIBLE] == "GPU-5a1b"
    assert NodeShare(1, 2).of(EngineConfig()).memory.limit_gb is None


def test_an_engine_without_a_gpu_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, "0", "1")
    with pytest.raises(EngineFailed, match=r"engine 3 of 3 has no GPU: this machine has 2\. Set engines_per_node"):
        NodeShare(2, 3).take_gpu("auto")


def test_engines_on_a_cpu_divide_the_memory_unless_each_ones_limit_is_named(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch)
    assert NodeShare(0, 4).of(EngineConfig(), lambda: 40 * 2**30).memory.limit_gb == pytest.approx(8)
    named = EngineConfig.model_validate({"memory": {"limit_gb": 3}})
    assert NodeShare(0, 4).of(named).memory.limit_gb == 3
    NodeShare(1, 4).take_gpu("auto")
    assert os.environ[VISIBLE] == "7"


def test_engines_have_their_own_folders_and_ports_and_divide_the_disk():
    cache = NodeShare(1, 2).of(EngineConfig.model_validate(DISK)).prefix_cache
    assert cache.disk is not None
    assert (cache.disk.path, cache.disk.max_gb, cache.fetch_port) == ("/cache/engine-1", 5.0, 7001)
