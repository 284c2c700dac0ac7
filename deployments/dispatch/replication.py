"""Replication: after a turn, what it has added is copied to the node that is asked next if its own node dies."""

import asyncio
import logging
from collections import OrderedDict

from deployments.dispatch.hand_over import MARGIN_S, Ask
from deployments.dispatch.placer import Placer
from deployments.requests import SilentEngine

log = logging.getLogger("ray.serve")

MAX_TURNS = 64
"""Conversations that wait to be copied; the one that has waited for longest is given up first."""

AFTER_S = 0.5
"""Time after a turn in which its engine stores the answer, and the next turn may come."""

COPY_S = 60.0
"""Longest time for one copy, the wait for an idle link included."""


class Replication:
    """Copies the conversations that one ingress has answered, one at a time, in the background.

    Args:
        placer: Knows where the requests of a conversation go.
        ask: Calls engines.
    """

    def __init__(self, placer: Placer, ask: Ask):
        self._placer = placer
        self._ask = ask
        self._turns: OrderedDict[int, str] = OrderedDict()  # conversation -> the node of its last turn
        self._copying: asyncio.Task[None] | None = None

    def turn_ended(self, conversation: int, node_id: str) -> None:
        """Copy a conversation soon; of one that waits already, only the last turn's node counts."""
        self._turns[conversation] = node_id
        self._turns.move_to_end(conversation)
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)
        if self._copying is None or self._copying.done():
            self._copying = asyncio.ensure_future(self._copy_all())

    async def _copy_all(self) -> None:
        while self._turns:
            await asyncio.sleep(AFTER_S)
            conversation, node_id = self._turns.popitem(last=False)
            try:
                await self._copy(conversation, node_id)
            except Exception:
                log.exception("a conversation could not be copied")

    async def _copy(self, conversation: int, node_id: str) -> None:
        if not (address := self._placer.address_of(node_id)):
            return
        said = await self._ask("movable_conversation", node_id, conversation)
        if isinstance(said, SilentEngine) or said.answer is None:
            return
        for successor, snapshots in self._placer.successors([said.answer], self._placer.lost_with(node_id)).items():
            for snapshot in snapshots:
                await self._ask("copy", successor, address, snapshot, COPY_S, timeout_s=COPY_S + MARGIN_S)
