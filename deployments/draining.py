"""How a replica learns that Serve is about to stop it.

Serve stops a replica by waiting until its requests are over, and kills it after graceful_shutdown_timeout_s, without
a word to our code: `__del__` comes when all is over. But it sets a flag first (ray_seams.stop_flag), which is watched
here. tests/deployments/test_draining.py fails when Ray no longer does it this way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deployments.args import DRAIN_TIMEOUT_S as DRAIN_TIMEOUT_S
from deployments.ray_seams import stop_flag
from deployments.replica import in_replica

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
    return asyncio.ensure_future(_watch(stop_flag(), act))


async def _watch(is_stopping: Callable[[], bool], act: Callable[[], Awaitable[None]]) -> None:
    while not is_stopping():  # noqa: ASYNC110 (Ray sets a flag, not an event)
        await asyncio.sleep(LOOKED_EVERY_S)
    try:
        await act()
    except Exception:
        log.exception("this replica could not be drained")
