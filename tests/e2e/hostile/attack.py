"""Sends the rows of the table: small ones several at once, large ones one by one, slow ones beside all others."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from tests.e2e.hostile.replies import Reply
from tests.e2e.hostile.rows import Row, Target

AT_ONCE = 8
"""Connections for small rows. Those of the slow rows are beside them: fewer than sixty-four in all."""


@dataclass(frozen=True)
class Outcome:
    replies: tuple[Reply, ...]
    lasted_s: float


async def attack(
    base_url: str, rows: Sequence[Row], transport: httpx.AsyncBaseTransport | None = None
) -> dict[str, Outcome]:
    """Return the outcome of each row by its name. Never raises for what the server does.

    transport: of well-formed requests; None for connections to the server.
    """
    url = urlsplit(base_url)
    outcomes: dict[str, Outcome] = {}
    limits = httpx.Limits(max_connections=AT_ONCE + 4, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=150, transport=transport) as http:
        target = Target(url.hostname or "", url.port or 80, http)

        async def send(rows: Sequence[Row]) -> None:
            for row in rows:
                outcomes[row.name] = await _sent(row, target)

        slow = [asyncio.ensure_future(send([row])) for row in rows if row.cost == "slow"]
        small = [row for row in rows if row.cost == "small"]
        await asyncio.gather(*(send(small[i::AT_ONCE]) for i in range(AT_ONCE)))
        await send([row for row in rows if row.cost == "large"])
        await asyncio.gather(*slow)
    return outcomes


async def _sent(row: Row, target: Target) -> Outcome:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(row.within_s):
            replies = await row.request.send(target)
    except TimeoutError:
        replies = [Reply(error=f"no answer within {row.within_s:g} s", elapsed_s=time.monotonic() - began_s)]
    except Exception as error:  # the row fails, the others go on
        replies = [Reply(error=f"{type(error).__name__}: {error}", elapsed_s=time.monotonic() - began_s)]
    return Outcome(tuple(replies), time.monotonic() - began_s)
