"""UnreadBodies: limits on request bodies that are still arriving: their number, bytes and rate.

It is used in Serve's HTTP proxy, which would buffer bodies without bound, and in the ingress. A body counts, with the
bytes that its Content-Length announces, until it is complete. At a limit, a new body displaces the slowest one that is
below the minimum rate, so that connections that send nothing cannot block others.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from deployments.http.client_address import address_group, client_host
from deployments.http.errors import BodyTooLarge, BodyTooSlow
from engine import retry_after
from engine.errors import Overloaded

MIN_AGE_S = 1.0
"""Age before which a body is never displaced, as its first bytes may still be in transit."""

LATE_S = 0.2
"""Additional wait at a body's deadline for bytes that arrived while this process was busy."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class BodyLimits:
    """Limits on arriving bodies, see HttpConfig; the defaults hold in a proxy that has not been configured yet."""

    max_body_bytes: int = 64 * 2**20  # of one body
    max_bodies: int = 1024  # arriving at the same time
    max_bytes: int = 512 * 2**20  # of all arriving bodies
    min_bytes_per_s: int = 64 * 2**10  # least average rate of one body after grace_s
    grace_s: float = 5.0  # time in which a body may be slower
    max_share_per_address: float = 0.25  # fraction of max_bodies and max_bytes that one client address may use


class UnreadBodies:
    """The bodies that are arriving at one process. `limits` may be replaced and then applies to later bytes."""

    def __init__(self, limits: BodyLimits, clock: Clock = time.monotonic):
        self.limits = limits
        self._clock = clock
        self._bodies: set[UnreadBody] = set()

    @contextmanager
    def enter(self, scope: Scope) -> Iterator["UnreadBody"]:
        """Count a request's body until the context exits or the body is complete.

        Raises:
            BodyTooLarge: It announces too many bytes.
            Overloaded: A limit is reached and no body can be displaced.
        """
        announced = Headers(scope=scope).get("content-length", "")
        num_announced = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
        if num_announced > self.limits.max_body_bytes:
            raise BodyTooLarge(num_announced, self.limits.max_body_bytes)
        body = UnreadBody(self, address_group(client_host(scope)), self._clock)
        self._make_room(body, num_announced)
        body.num_reserved = num_announced
        self._bodies.add(body)
        try:
            yield body
        finally:
            self.release(body)

    def reserve(self, body: "UnreadBody", num_bytes: int) -> None:
        """Raise the bytes that a body counts for to num_bytes. Raises Overloaded at a limit."""
        if num_bytes > body.num_reserved:
            self._make_room(body, num_bytes)
            body.num_reserved = num_bytes

    def release(self, body: "UnreadBody") -> None:
        self._bodies.discard(body)

    def status(self) -> dict[str, Any]:
        return {"num_unread": len(self._bodies), "unread_bytes": sum(body.num_reserved for body in self._bodies)}

    def _make_room(self, body: "UnreadBody", num_bytes: int) -> None:
        limits = self.limits
        share = limits.max_share_per_address
        if body.address is not None and share < 1:
            same = {other for other in self._bodies - {body} if other.address == body.address}
            max_bodies = max(1, int(share * limits.max_bodies))
            self._fit(same, num_bytes, max_bodies, int(share * limits.max_bytes), " from one address")
        self._fit(self._bodies - {body}, num_bytes, limits.max_bodies, limits.max_bytes, "")

    def _fit(self, others: set["UnreadBody"], num_bytes: int, max_bodies: int, max_bytes: int, whose: str) -> None:
        """Displace slow bodies among `others` until another body with `num_bytes` fits. Raises Overloaded."""
        while others and (len(others) >= max_bodies or sum(b.num_reserved for b in others) + num_bytes > max_bytes):
            slowest = self._slowest(others)
            if slowest is None:
                num_held = sum(b.num_reserved for b in others)
                limit = "max_unread_bodies" if len(others) >= max_bodies else "max_unread_bytes"
                raise Overloaded(
                    f"{len(others)} request bodies with {num_held} bytes{whose} are arriving and one "
                    f"with {num_bytes} bytes or more was added; the limits are {max_bodies} bodies and {max_bytes} "
                    f"bytes{whose} (http.max_unread_bodies, http.max_unread_bytes"
                    f"{', http.max_share_per_address' if whose else ''}).",
                    retry_after.BODY_S,
                    limit,
                )
            self.release(slowest)
            others.discard(slowest)
            slowest.displace()

    def _slowest(self, bodies: set["UnreadBody"]) -> "UnreadBody | None":
        """Return the slowest body of the address with the most bodies, among bodies below the minimum rate."""
        slow = [body for body in bodies if body.age_s >= MIN_AGE_S and body.rate < self.limits.min_bytes_per_s]
        held = Counter(body.address for body in bodies)
        return min(slow, key=lambda body: (-held[body.address], body.rate), default=None)


class UnreadBody:
    """One body that is arriving."""

    def __init__(self, bodies: UnreadBodies, address: str | None, clock: Clock):
        self.address = address  # see address_group
        self.num_received = 0  # bytes
        self.num_reserved = 0  # bytes that the body counts for
        self._bodies = bodies
        self._clock = clock
        self._began_s = clock()
        self._displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def age_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def rate(self) -> float:
        """Average bytes per second since the headers."""
        return self.num_received / max(self.age_s, 1e-3)

    def displace(self) -> None:
        """End this body in favour of another one: the pending or the next `receive` raises BodyTooSlow."""
        if not self._displaced.done():
            self._displaced.set_result(None)

    async def receive(self, receive: Receive) -> Message:
        """Return the next ASGI message of this body; after the last one the body no longer counts.

        Raises:
            BodyTooSlow: The body is below the minimum rate or was displaced.
            BodyTooLarge: The body exceeds max_body_bytes.
            Overloaded: Bytes that were not announced exceed a limit.
        """
        message = await self._receive_in_time(receive)
        limits = self._bodies.limits
        self.num_received += len(message.get("body", b""))
        if self.num_received > limits.max_body_bytes:
            raise BodyTooLarge(self.num_received, limits.max_body_bytes)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._bodies.release(self)
        else:
            self._bodies.reserve(self, self.num_received)
        return message

    async def _receive_in_time(self, receive: Receive) -> Message:
        limits = self._bodies.limits
        deadline_s = limits.grace_s + self.num_received / limits.min_bytes_per_s
        message = asyncio.ensure_future(receive())
        try:
            waits = {message, self._displaced}
            timeout_s = max(0.0, deadline_s - self.age_s)
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not message.done() and not self._displaced.done():
                await asyncio.wait({message}, timeout=LATE_S)
            if not message.done() or self._displaced.done():
                raise BodyTooSlow(self.num_received, self.age_s, limits.min_bytes_per_s)
            return message.result()
        finally:
            message.cancel()


async def read_body(scope: Scope, receive: Receive, bodies: UnreadBodies) -> bytes:
    """Read a whole body.

    Raises:
        BodyTooLarge, BodyTooSlow, Overloaded: See UnreadBody.receive.
        ClientDisconnect: The client disconnects before its end.
    """
    chunks = []
    with bodies.enter(scope) as body:
        while True:
            try:
                message = await body.receive(receive)
            except OSError:
                raise ClientDisconnect from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(chunks)
