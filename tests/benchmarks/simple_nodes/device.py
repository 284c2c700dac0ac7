"""A simple node: one prompt is computed at a time, rows decode beside it, and quotes are the engine's own.

Between two events nothing changes but what is left of the prompt and of the answers, so that a request costs a few
events instead of hundreds of steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from deployments.placement.place import NodeFacts
from engine.config import EngineConfig
from engine.core.admission import SHORT_PART
from engine.core.cost_model import CostModel
from engine.core.memory.needs import MemoryNeeds
from engine.core.prompt_queue import queue_rank
from engine.core.quoting.load import LoadRecorder
from engine.core.quoting.quoter import Quoter
from engine.core.runner import ChunkTime, Drafts, StepTime
from engine.placement import Question, Quote
from tests.benchmarks.sim_runner import GIB, Machine
from tests.benchmarks.simple_nodes.cache import SimpleCache, system_digest, turn_digest
from tests.benchmarks.simple_nodes.loads import Turn

CONFIG = EngineConfig()
MAX_HEADROOM_BYTES = 8 * GIB
CHUNK_TOKENS = 2048
ROUNDING_S = 1e-6
"""What is left of a prompt, or tokens of an answer, that counts as nothing."""


@dataclass(slots=True, eq=False)
class Work:
    """A turn at a node: its prompt and row at once, as far as LoadRecorder reads them."""

    turn: Turn
    spec: Any
    rank: float
    end: int
    """Tokens of the prompt."""
    num_tokens: int
    """Tokens of the prompt and, at its end, of the answer."""
    reserved_bytes: int
    cached: int = 0
    total_s: float = 0.0
    left_s: float = 0.0
    """Of `total_s`, the seconds of the device until the prompt is computed."""
    left_tokens: float = 0.0
    """Tokens of the answer that are missing."""
    priority: int = 0
    cached_hint: None = None
    output_token_ids: range = range(0)
    rows: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = (self,)

    @property
    def row(self) -> "Work":
        return self

    @property
    def start(self) -> int:
        """Tokens that are computed."""
        return round(self.end - (self.end - self.cached) * self.left_s / max(self.total_s, ROUNDING_S))


class Device:
    """A node.

    Args:
        name: Its id.
        machine: How many bytes and seconds everything takes.
        clock: Returns virtual seconds.
        ended: Called with a turn that has its answer.

    Attributes:
        next_s: When it has its next event; infinite if it is idle.
        busy_s: Seconds in which it has worked.
        num_computed: Prompt tokens that it has computed.
        num_asked: Questions that it has been asked.
        is_draining: Whether it takes no more turns.
        began_s: When it joined.
        ended_s: When it left; None before.
    """

    def __init__(self, name: str, machine: Machine, clock: Callable[[], float], ended: Callable[[Turn], None]):
        headroom = min(machine.memory_bytes / 8, MAX_HEADROOM_BYTES)
        self.name, self.machine = name, machine
        self.next_s, self.began_s = float("inf"), clock()
        self.ended_s: float | None = None
        self.busy_s, self.num_computed, self.num_asked, self.is_draining = 0.0, 0, 0, False
        self._clock, self._ended = clock, ended
        self._costs = cost_model(machine)
        self._needs = MemoryNeeds(machine.costs, int(machine.memory_bytes - headroom), CONFIG.memory.reserve_tokens)
        self._cache = SimpleCache(machine.costs)
        self._queue: list[Work] = []
        self._prompts: list[Work] = []  # the oldest first
        self._rows: list[Work] = []
        self._current: Work | None = None
        self._step_s = self._token_s = self._stall_s = 0.0
        self._at_s = clock()
        drafts = drafts_of(machine)
        self._tokens_per_step = tokens_per_step(machine)
        prefills = SimpleNamespace(in_progress=self._prompts, images_s=lambda one: 0.0, drafts=drafts)
        self._view: Any = SimpleNamespace(
            prefills=prefills, queue=SimpleNamespace(prompts=self._queue), budget=SimpleNamespace()
        )
        prefix: Any = SimpleNamespace(boundary_digests=_boundary_digests, store=SimpleNamespace(get=self._cache.find))
        self._view.num_running = self._view.num_decoding = self._view.budget.reserved_bytes = 0
        self.recorder = LoadRecorder(clock, self._view, prefix, self._costs)
        self.quoter = Quoter(CONFIG, clock, self._costs, self._needs, self.recorder, True)

    @property
    def facts(self) -> NodeFacts:
        """What it says of itself at its start."""
        return NodeFacts(self.name, self._needs.request_bytes, pace_s=self._costs.prompt_s(0, 2048))

    @property
    def open_turns(self) -> list[Turn]:
        return [work.turn for work in (*self._queue, *self._prompts, *self._rows)]

    def quote(self, question: Question) -> Quote:
        """Answer a question."""
        self.num_asked += 1
        if (refusal := self._refusal()) is not None:
            return refusal
        self._publish()
        return self.quoter.quote(question)

    def book(self, question: Question) -> Quote | None:
        """Take a booking; see Quoter.book."""
        if (refusal := self._refusal()) is not None:
            return refusal
        self._publish()
        return self.quoter.book(question)

    def take(self, turn: Turn) -> None:
        """Queue a turn."""
        self._advance()
        now, costs = self._clock(), self.machine.costs
        reserved = costs.rows(1, costs.slots(turn.num_tokens + turn.answer_left))
        rank = queue_rank(CONFIG.scheduler, now, turn.num_tokens, 0)
        spec = SimpleNamespace(request_id=turn.request_id, keys=turn.keys, images=(), turn=turn)
        work: Any = Work(turn, spec, rank, turn.num_tokens, turn.num_tokens, reserved)
        self._queue.append(work)
        self.quoter.bookings.remove(turn.request_id)
        self.recorder.request_arrived(work)
        self._plan()

    def step(self) -> None:
        """Handle what happens now."""
        self._advance()
        current = self._current
        if current is not None and current.left_s <= ROUNDING_S:
            self._prompts.remove(current)
            self._cache.computed(current.turn)
            self.num_computed += current.end - current.cached
            self._rows.append(current)
            if current.turn.first_s is None:
                current.turn.first_s = self._clock()
        for work in [work for work in self._rows if work.left_tokens <= ROUNDING_S]:
            self._rows.remove(work)
            self._end(work)
        self._plan()

    def stop(self) -> list[Turn]:
        """Leave; return the turns that have no answer, with what they have got of it."""
        self._advance()
        self.ended_s, self.next_s = self._clock(), float("inf")
        for work in self._rows:
            said = max(0, work.turn.answer_left - max(1, round(work.left_tokens)))
            work.turn.answer_left -= said
            work.turn.num_tokens += said
        turns = self.open_turns
        for work in (self._queue, self._prompts, self._rows, self._cache):
            work.clear()
        self._current = None
        return turns

    def _refusal(self) -> Quote | None:
        if self.is_draining:
            return Quote(refusal="draining")
        num_open = len(self._queue) + len(self._prompts) + len(self._rows) + self.quoter.num_booked
        return Quote(refusal="queue_full") if num_open >= CONFIG.max_running + CONFIG.max_queue else None

    def _end(self, work: Work) -> None:
        turn, entry = work.turn, None
        turn.num_tokens += turn.answer_left
        work.num_tokens, work.output_token_ids = turn.num_tokens, range(turn.answer_left)
        turn.answer_left = 0
        row: Any = work
        entry: Any = self._cache.store(turn)
        self.recorder.answer_complete(row, entry)
        self._ended(turn)

    def _advance(self) -> None:
        """Let the seconds since the last event pass."""
        now = self._clock()
        passed_s, self._at_s = now - self._at_s, now
        if passed_s <= 0 or (self._current is None and not self._rows):
            return
        self.busy_s += passed_s
        cycle_s = self._stall_s + self._step_s
        if self._current is not None:
            self._current.left_s -= passed_s * self._stall_s / cycle_s
        for work in self._rows:
            work.left_tokens -= passed_s / cycle_s * self._tokens_per_step

    def _plan(self) -> None:
        """Begin prompts that fit, choose the one that is computed, and find the next event."""
        while self._queue and self._fits(self._queue[0]):
            self._begin(self._queue.pop(0))
        self._current = self._next_prompt()
        longest = max((work.end for work in self._rows), default=0)
        self._step_s = 0.0
        if self._rows:
            self._step_s = self.machine.step_seconds([(len(self._rows), longest)], drafts_of(self.machine).num_tokens)
        self._stall_s = 0.0
        if self._current is not None:
            self._stall_s = CONFIG.scheduler.max_stall_s
        cycle_s = self._stall_s + self._step_s
        ends_s = [cycle_s * work.left_tokens / self._tokens_per_step for work in self._rows]
        if self._current is not None:
            ends_s.append(self._current.left_s * cycle_s / self._stall_s)
        self.next_s = self._clock() + max(0.0, min(ends_s)) if ends_s else float("inf")
        self._publish(is_planned=True)

    def _fits(self, work: Work) -> bool:
        num_rows = len(self._rows) + len(self._prompts)
        return not num_rows or (num_rows < CONFIG.max_running and self._reserved + work.reserved_bytes <= self._room)

    @property
    def _reserved(self) -> int:
        return sum(work.reserved_bytes for work in (*self._prompts, *self._rows))

    @property
    def _room(self) -> int:
        return self._needs.request_bytes

    def _begin(self, work: Work) -> None:
        """Continue from the longest cached prefix, and evict what the row has no room beside."""
        work.cached = self.recorder.prefixes.cached(work.turn.keys, work.end - 1).num_tokens
        if work.turn.first_s is None:
            work.turn.cached = work.cached
        work.total_s = work.left_s = prompt_seconds(self.machine, work.cached, work.end)
        work.left_tokens = max(1, work.turn.answer_left)
        self._cache.lend(work.turn)
        self._prompts.append(work)
        self._cache.shrink(self._room - self._reserved)

    def _next_prompt(self) -> Work | None:
        """Return the oldest prompt, or a much shorter one that passes it."""
        if not self._prompts:
            return None
        shortest, oldest = min(self._prompts, key=lambda work: work.left_s), self._prompts[0]
        return shortest if shortest.left_s <= SHORT_PART * oldest.left_s else oldest

    def _publish(self, is_planned: bool = False) -> None:
        if not is_planned:
            self._advance()
        view = self._view
        view.num_decoding, view.num_running = len(self._rows), len(self._rows) + len(self._prompts)
        view.budget.reserved_bytes = self._reserved
        self.recorder.publish()


def prompt_seconds(machine: Machine, start: int, end: int) -> float:
    """Return the seconds of a prompt's tokens `start` to `end` in whole chunks."""
    num_tokens = end - start
    chunks = -(-num_tokens // CHUNK_TOKENS)
    return chunks * machine.chunk_s + machine.token_s * num_tokens + machine.pair_s * (end**2 - start**2) / 2


def drafts_of(machine: Machine) -> Drafts:
    return Drafts(len(machine.acceptance))


def tokens_per_step(machine: Machine) -> float:
    """Return the mean tokens of a row in a step: each draft counts if those before it hold, too."""
    tokens = likely = 1.0
    for acceptance in machine.acceptance:
        likely *= acceptance
        tokens += likely
    return tokens


@cache
def cost_model(machine: Machine) -> CostModel:
    """Return a model that has measured the machine, with rows of 32,000 tokens. All nodes of a machine share it."""
    drafts, num_tokens = drafts_of(machine), 32_000
    seconds = {rows: machine.step_seconds([(rows, num_tokens)], drafts.num_tokens) for rows in (1, 2, 4, 8, 16, 32)}
    steps = [StepTime(rows, drafts, each) for rows, each in seconds.items()]
    steps += [StepTime(rows, Drafts(), machine.step_seconds([(rows, num_tokens)], 0)) for rows in seconds]
    model = CostModel((drafts,), steps, [ChunkTime(256, machine.chunk_seconds(0, 256))])
    for start in range(0, 128_000, 8_000):
        model.record_chunk(CHUNK_TOKENS, start, machine.chunk_seconds(start, CHUNK_TOKENS))
    for rows, each in seconds.items():
        for _ in range(2):  # the first one after a change of rows is ignored
            model.record_step(rows, drafts, tokens_per_step(machine), each)
    return model


def _boundary_digests(work: Any) -> list[tuple[str, int, str]]:
    turn: Turn = work.turn
    system = turn.conversation.system_tokens
    found = [("system", system, system_digest(turn))] if system else []
    return [*found, ("turn", turn.num_tokens, turn_digest(turn))]
