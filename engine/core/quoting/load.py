"""LoadRecorder: what quotes need to know of the engine's work, published by its thread for others to read."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.cost_model import CostModel
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prompt import USUAL_ANSWER, Prompt
from engine.core.quoting.known_prefixes import KnownPrefixes
from engine.core.quoting.residents import Residents
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts
from engine.core.scheduler import Scheduler

MAX_QUEUED = 64
"""Queued requests that quotes consider one by one."""

MAX_ARRIVED = 1024
"""Request ids of the last arrivals."""

OPEN_S = 300.0
"""Seconds after which an open request has lost two thirds of its weight in the mean."""

USUAL_TURN = 2048
"""Assumed new tokens of a later turn before any has arrived."""

TURN_WEIGHT = 0.1
"""Weight of a turn in the moving average of the device's seconds."""

ANSWER_WEIGHT = 0.1
"""Weight of a complete answer in the moving average of their lengths."""


class PromptLeft(NamedTuple):
    """A prompt that is queued or in progress."""

    start: int
    """Tokens that are computed or expected to be cached."""
    end: int
    """Tokens of the prompt."""
    num_rows: int
    priority: int
    rank: float
    """See Prompt."""
    images_s: float = 0.0
    """Seconds until its images are encoded."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's work at the end of a step."""

    in_progress: tuple[PromptLeft, ...] = ()
    queued: tuple[PromptLeft, ...] = ()
    """The first MAX_QUEUED."""
    num_queued: int = 0
    num_decoding: int = 0
    drafts: Drafts = PLAIN
    """Drafts that each decoding row verifies per step."""
    reserved_bytes: int = 0
    """Bytes reserved for rows and prompts when a request last arrived, began or ended."""
    answer_tokens: float = USUAL_ANSWER
    """Mean tokens of the last answers."""
    mean_open: float = 0.0
    """Mean number of open requests over the last minutes, weighted by their seconds, as of `at_s`."""
    turn_s: float = 0.0
    """Mean seconds of the device for a later turn of a conversation."""
    at_s: float = 0.0
    """When this was published."""

    def mean_open_at(self, now: float) -> float:
        """Return the mean number of open requests, as of `now`."""
        num_open = len(self.in_progress) + self.num_queued + self.num_decoding
        return num_open + (self.mean_open - num_open) * math.exp((self.at_s - now) / OPEN_S)


class LoadRecorder:
    """Runs on the engine's thread. `load` is replaced as a whole, so that other threads may read it at any time.

    Args:
        clock: Returns monotonic seconds.
        scheduler: The scheduler.
        prefix: The prefix cache.
        costs: Predicts seconds.

    Attributes:
        load: The engine's work.
        prefixes: Snapshots by the keys of prompts.
        residents: Conversations that have been computed lately.
        arrived: Ids of the requests that have arrived last.
    """

    def __init__(self, clock: Callable[[], float], scheduler: Scheduler, prefix: PrefixCache, costs: CostModel):
        self.load = EngineLoad(at_s=clock())
        self._clock = clock
        self._costs = costs
        self._turn_s: float | None = None
        self.prefixes = KnownPrefixes(prefix.store.get)
        self.residents = Residents(clock)
        self.arrived: OrderedDict[str, None] = OrderedDict()
        self._scheduler = scheduler
        self._prefix = prefix
        self._answer_tokens = float(USUAL_ANSWER)
        self._queued: list[Prompt] = []  # of `load.queued`
        self._num_rows = -1  # reserved rows at the last reading of the budget
        self._reserved_bytes = 0

    def request_arrived(self, row: Row) -> None:
        """Note a queued request by its first row. Its booking counts until this has returned."""
        spec = row.spec
        if spec.keys is not None and (boundaries := self._prefix.boundary_digests(row)):
            system_tokens = 0
            for kind, num_tokens, digest in boundaries:
                if kind == "system":
                    self.prefixes.note(spec.keys.system, digest, num_tokens)
                    system_tokens = num_tokens
                elif kind == "turn" and spec.keys.turns:
                    self.prefixes.note(spec.keys.turns[0], digest, num_tokens, spec.keys.conversation)
            if spec.keys.conversation in self.residents:
                self._note_turn(self.prefixes.cached(spec.keys, row.num_tokens - 1).num_tokens, row.num_tokens)
            elif self._turn_s is None:
                self._note_turn(row.num_tokens, row.num_tokens + USUAL_TURN)
            self.residents.arrived(spec.keys, row.num_tokens, system_tokens)
        self.publish()
        self.arrived[spec.request_id] = None
        if len(self.arrived) > MAX_ARRIVED:
            self.arrived.popitem(last=False)

    def _note_turn(self, num_cached: int, num_tokens: int) -> None:
        answer_s = self._answer_tokens * (self._costs.token_s(1) or 0.0)
        seconds = self._costs.prompt_s(num_cached, num_tokens) + answer_s
        self._turn_s = seconds if self._turn_s is None else self._turn_s + TURN_WEIGHT * (seconds - self._turn_s)

    def answer_complete(self, row: Row, node: SnapshotNode | None) -> None:
        """Note a complete answer. node: the snapshot after it; None without one."""
        self._answer_tokens += ANSWER_WEIGHT * (len(row.output_token_ids) - self._answer_tokens)
        if (keys := row.spec.keys) is None:
            return
        if node is not None and keys.turns:
            self.prefixes.note_answer(keys.turns[0], node)
        self.residents.answered(keys, row.num_tokens)

    def publish(self) -> None:
        """Publish the engine's work as it is now."""
        scheduler, before = self._scheduler, self.load
        prefills, prompts = scheduler.prefills, scheduler.queue.prompts
        if len(prompts) == before.num_queued and prompts[:MAX_QUEUED] == self._queued:
            queued = before.queued
        else:
            known = dict(zip(map(id, self._queued), before.queued, strict=False))  # the list keeps the ids' owners
            self._queued = prompts[:MAX_QUEUED]
            queued = tuple(known.get(id(prompt)) or self._left_of(prompt) for prompt in self._queued)
        if (num_rows := scheduler.num_running) != self._num_rows or queued is not before.queued:
            self._num_rows, self._reserved_bytes = num_rows, scheduler.budget.reserved_bytes
        self.load = EngineLoad(
            tuple(
                PromptLeft(
                    one.start,
                    one.end,
                    len(one.rows),
                    one.priority,
                    one.rank,
                    prefills.images_s(one) if one.row.spec.images else 0.0,
                )
                for one in prefills.in_progress
            ),
            queued,
            len(prompts),
            scheduler.num_decoding,
            prefills.drafts,
            self._reserved_bytes,
            self._answer_tokens,
            before.mean_open_at(now := self._clock()),
            self._turn_s or 0.0,
            now,
        )

    def _left_of(self, prompt: Prompt) -> PromptLeft:
        row, keys = prompt.row, prompt.row.spec.keys
        if row.cached_hint is not None:
            start = row.cached_hint[1]
        else:
            start = 0 if keys is None else self.prefixes.cached(keys, row.num_tokens).num_tokens
        return PromptLeft(min(start, prompt.end - 1), prompt.end, len(prompt.rows), prompt.priority, prompt.rank)
