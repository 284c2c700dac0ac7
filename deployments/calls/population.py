"""Populations: replicas that run the same code, which alone share requests while a cluster is upgraded.

Each engine, Ingress and scorer states its code in its replica's metadata. A router calls the replicas of its own
population. Only if there is none does it call others, and never one that reads messages otherwise: Ray sends them as
pickled dataclasses, in which a new or moved field would be taken for another one.
"""

import importlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from deployments.cluster.sources import population_digest
from deployments.ray_internals import RunningNode

CODE = "code"
"""Key of a replica's statement in its metadata."""

MESSAGES = (
    "engine.protocol",
    "engine.status",
    "engine.placement",
    "engine.timeline",
    "engine.core.spec_prefill.plan",
    "deployments.requests",
)
"""Modules with the dataclasses that one replica sends to another."""


@cache
def own_code() -> dict[str, str]:
    """Return the statement of this process, as it is in the metadata of its replica.

    `population` identifies Orchard's sources and the libraries that compute, `messages` the dataclasses of MESSAGES.
    """
    return {"population": population_digest(), "messages": messages_digest()}


def messages_digest() -> str:
    """Return a hex digest over names and types of the fields of all dataclasses in MESSAGES."""
    digest = sha256()
    for module in MESSAGES:
        for name, found in sorted(vars(importlib.import_module(module)).items()):
            if isinstance(found, type) and is_dataclass(found):
                content = [(field.name, str(field.type)) for field in fields(found)]
                digest.update(f"{module}.{name} {content}\n".encode())
    return digest.hexdigest()[:32]


def is_of_own_population(metadata: dict[str, Any]) -> bool:
    """Tell whether a replica runs the code of this process; true without a statement, as outside a cluster."""
    return CODE not in metadata or metadata[CODE]["population"] == own_code()["population"]


def is_understood(metadata: dict[str, Any]) -> bool:
    """Tell whether a replica reads messages as this process writes them; true without a statement."""
    return CODE not in metadata or metadata[CODE]["messages"] == own_code()["messages"]


def among(nodes: Sequence[RunningNode]) -> list[RunningNode]:
    """Return the nodes of this process's population; if there is none, those that understand its messages."""
    own = [node for node in nodes if is_of_own_population(node.metadata)]
    return own or [node for node in nodes if is_understood(node.metadata)]
