"""How the engine of a replica shares snapshots with those of other nodes: its address, certificate, and secret."""

import hmac
import ipaddress
import os
from hashlib import sha256

import ray

from deployments.cluster.folder import FolderError
from deployments.cluster.mutual_tls import machine_tls_in
from deployments.ray_internals import cluster_token
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.snapshot_store.exchange import Sharing

PURPOSE = b"orchard snapshots"
"""Derives the secret from Ray's token, so that one cannot be computed from the other."""


def sharing_of(config: EngineConfig, is_alone: bool = True) -> Sharing | None:
    """Return the sharing of an engine on this node; None if it shares nothing.

    Args:
        config: The engine's configuration.
        is_alone: Whether it is the only engine of its node.

    Raises:
        EngineFailed: prefix_cache.fetch is on, but this node is in no cluster with token authentication; or its
            certificate cannot be read.
    """
    cache = config.prefix_cache
    if cache.disk is None or cache.fetch == "off":
        return None
    token = cluster_token() if ray.is_initialized() else ""
    if not token:
        if cache.fetch == "on":
            raise EngineFailed(
                "prefix_cache.fetch is on, but Ray runs without token authentication, from which nodes derive the "
                "secret that they prove to one another. Put the same ~/.ray/auth_token on every node and start Ray "
                "with RAY_AUTH_MODE=token, or set prefix_cache.fetch: off"
            )
        return None
    host = ray.util.get_node_ip_address()
    if cache.fetch == "auto" and is_alone and ipaddress.ip_address(host).is_loopback:  # a single engine
        return None
    try:
        tls = machine_tls_in(os.environ)
    except FolderError as error:
        raise EngineFailed(f"snapshots cannot be shared: {error}") from None
    return Sharing(host, hmac.new(token.encode(), PURPOSE, sha256).digest(), tls)
