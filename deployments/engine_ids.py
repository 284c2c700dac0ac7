"""Engine ids: the names of engines to the routing and to clients.

The only engine of a node has the node's id. Where a node has several, one per GPU, each has the node's id, a colon and
its number, such as `4f0c:1`: to the routing it is a node of its own. In the modules that choose engines and call them
(`dispatch/`, `placement/`, `calls/`), a "node" is therefore an engine, and `node_id` of a replica, an answer's part, a
place or a timeline is the engine's id; `node_of` returns the node of Ray.
"""

from collections.abc import Mapping
from typing import Any

ENGINE_ID = "engine_id"
"""Key of an engine's id in the metadata of its replica."""

_SEPARATOR = ":"


def routing_id(node_id: str, metadata: Mapping[str, Any]) -> str:
    """Return the id by which calls name a replica: that of an engine, else its node's.

    Args:
        node_id: Node of the replica.
        metadata: Of the replica.
    """
    return metadata.get(ENGINE_ID, node_id)


def engine_ids(node_id: str, num_engines: int) -> list[str]:
    """Return the ids of a node's engines, in the order of their numbers."""
    if num_engines == 1:
        return [node_id]
    return [f"{node_id}{_SEPARATOR}{number}" for number in range(num_engines)]


def node_of(engine_id: str) -> str:
    """Return the id of an engine's node."""
    return engine_id.partition(_SEPARATOR)[0]


def number_of(engine_id: str) -> str:
    """Return the number of an engine on its node, from 0."""
    return engine_id.partition(_SEPARATOR)[2] or "0"


def short_id(engine_id: str, num_chars: int) -> str:
    """Return an engine's id with so many characters of its node's."""
    node_id, separator, number = engine_id.partition(_SEPARATOR)
    return f"{node_id[:num_chars]}{separator}{number}"
