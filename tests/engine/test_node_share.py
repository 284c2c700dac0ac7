import os

import pytest

from engine import node_share
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.gpus import VISIBLE
from engine.node_share import NodeShare

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
    first = NodeShare(0, 2).of(EngineConfig.model_validate(DISK)).prefix_cache
    assert first.disk is not None
    assert (first.disk.path, first.disk.max_gb, first.fetch_port) == ("/cache", 5.0, 7000)
    cache = NodeShare(1, 2).of(EngineConfig.model_validate(DISK)).prefix_cache
    assert cache.disk is not None
    assert (cache.disk.path, cache.disk.max_gb, cache.fetch_port) == ("/cache/engine-1", 5.0, 7001)


def test_a_port_above_the_last_is_refused_with_the_number_of_the_engine():
    at_end = EngineConfig.model_validate({"prefix_cache": {**DISK["prefix_cache"], "fetch_port": 65533}})
    assert NodeShare(2, 4).of(at_end).prefix_cache.fetch_port == 65535
    with pytest.raises(EngineFailed, match=r"fetch_port is 65533, and engine 3 .* 65536, above 65535.* 65532 or less"):
        NodeShare(3, 4).of(at_end)


def test_a_mac_whose_node_offers_several_engines_is_refused_unless_they_use_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_share, "has_metal", lambda device: device != "cpu")
    NodeShare(0, 2).take_gpu("cpu")
    with pytest.raises(EngineFailed, match=r"this Mac is to hold 2 engines, and its GPU can have one"):
        NodeShare(0, 2).take_gpu("auto")


def test_a_refusal_by_the_default_of_the_memory_says_that_it_is_a_share(monkeypatch: pytest.MonkeyPatch):
    reason = "the limit is 5 bytes (memory.limit_gb)"
    named = EngineConfig.model_validate({"memory": {"limit_gb": 3}})
    assert (
        NodeShare(1, 4).explained(reason, EngineConfig()).endswith("each of 4 engines here has a share of the memory)")
    )
    assert NodeShare(1, 4).explained(reason, named) == reason == NodeShare().explained(reason, EngineConfig())
    assert NodeShare(1, 4).explained("no such file", EngineConfig()) == "no such file"
    with_gpus(monkeypatch, "0", "1", "2", "3")
    assert NodeShare(1, 4).explained(reason, EngineConfig()) == reason, "each has the memory of its GPU"
