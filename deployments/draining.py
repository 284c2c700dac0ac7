"""How a replica learns that Serve is about to stop it: the one place where Orchard looks into Ray's own replica.

Serve stops a replica by waiting until its requests are over, and kills it after graceful_shutdown_timeout_s, without
a word to our code: `__del__` comes when all is over. But it sets a flag first, `_shutting_down` of the `_replica_impl`
of its actor (ray 2.60.0, ray/serve/_private/replica.py), and that is watched here. tests/deployments/test_draining.py
fails when Ray no longer does it this way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from deployments.args import DRAIN_TIMEOUT_S as DRAIN_TIMEOUT_S
from deployments.replica import in_replica
from engine.protocol import EngineFailed

log = logging.getLogger("ray.serve")

ENGINE_MARGIN_S = 5.0
"""An engine goes on for so much longer than the ingresses: it is they who tell the clients that their time is over."""

KILL_MARGIN_S = 20.0
"""What Serve adds to the time to drain before it kills: to see the flag, to tell the clients, to end the step of the
device that is running, and to give its memory back. More than ENGINE_MARGIN_S."""

LOOKED_EVERY_S = 0.2


def when_stopping(act: Callable[[], Awaitable[None]]) -> asyncio.Task[None] | None:
    """Does it, once, when Serve begins to stop this replica. The task must be kept: the loop alone would forget it.

    None outside of a replica, as in Serve's local testing mode. Raises EngineFailed where Ray's replica is not as we
    know it: requests would be cut off later, when nobody expects it.
    """
    if not in_replica():
        return None
    return asyncio.ensure_future(_watch(_replica(), act))


async def _watch(replica: Any, act: Callable[[], Awaitable[None]]) -> None:
    while not replica._shutting_down:  # noqa: ASYNC110 (Ray sets a flag, not an event)
        await asyncio.sleep(LOOKED_EVERY_S)
    try:
        await act()
    except Exception:
        log.exception("this replica could not be drained")


def _replica() -> Any:
    from ray._private.worker import global_worker as worker

    replica = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    if not isinstance(getattr(replica, "_shutting_down", None), bool):
        raise EngineFailed(
            f"Ray {ray.__version__} does not say that it stops a replica in the way that deployments/draining.py knows"
        )
    return replica
