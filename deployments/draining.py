"""Detects that Serve is about to stop this replica.

Serve waits until the replica's requests are over, kills the replica after graceful_shutdown_timeout_s, and calls user
code (`__del__`) only at the end. It sets a flag first (ray_internals.stop_flag), which is polled here.
tests/deployments/test_draining.py fails when Ray no longer sets it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deployments.args import DRAIN_TIMEOUT_S as DRAIN_TIMEOUT_S
from deployments.process import in_replica
from deployments.ray_internals import stop_flag

log = logging.getLogger("ray.serve")

ENGINE_MARGIN_S = 5.0
"""Time that an engine drains longer than an ingress, so that the ingress can end the requests with an error first."""

KILL_MARGIN_S = 20.0
"""Time between drain_timeout_s and Serve's kill: to notice the flag, end the requests with an error, finish the running
device step and free its memory. Must exceed ENGINE_MARGIN_S."""

LOOKED_EVERY_S = 0.2


def on_stop(act: Callable[[], Awaitable[None]]) -> asyncio.Task[None] | None:
    """Call `act` once when Serve begins to stop this replica.

    Returns:
        The watching task, which the caller must keep a reference to; None outside of a replica.

    Raises:
        EngineFailed: This version of Ray has no such flag. Without it a shutdown would cut off running requests.
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
