"""With whom an engine shares its snapshots."""

import pytest
import ray

from deployments import snapshot_sharing
from deployments.snapshot_sharing import sharing_of
from engine.config import EngineConfig
from engine.errors import EngineFailed


def config(**cache: object) -> EngineConfig:
    return EngineConfig.model_validate({"prefix_cache": {"disk": {"path": "x"}, **cache}})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The token and this node's address."""
    facts = {"token": "t" * 64, "host": "10.0.0.1"}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: facts["host"])
    monkeypatch.setattr(snapshot_sharing, "cluster_token", lambda: facts["token"])
    return facts


def test_a_node_of_a_cluster_shares_at_its_address_with_a_secret_that_is_not_rays(cluster):
    sharing = sharing_of(config())
    assert sharing is not None and sharing.host == "10.0.0.1"
    assert len(sharing.token) == 32 and sharing.token not in cluster["token"].encode()
    assert cluster["token"] not in repr(sharing) and repr(sharing.token) not in repr(sharing)
    cluster["token"] = "u" * 64
    assert sharing_of(config()) != sharing


def test_a_single_machine_shares_only_if_it_is_told_to(cluster):
    cluster["host"] = "127.0.0.1"
    assert sharing_of(config()) is None
    sharing = sharing_of(config(fetch="on"))
    assert sharing is not None and sharing.host == "127.0.0.1"


def test_nothing_is_shared_without_disk_or_if_that_is_off(cluster):
    assert sharing_of(EngineConfig()) is None
    assert sharing_of(config(fetch="off")) is None


def test_without_token_authentication_nothing_is_shared_and_on_is_refused(cluster):
    cluster["token"] = ""
    assert sharing_of(config()) is None
    with pytest.raises(EngineFailed, match="RAY_AUTH_MODE=token"):
        sharing_of(config(fetch="on"))


def test_outside_of_ray_nothing_is_shared():
    assert sharing_of(config()) is None
