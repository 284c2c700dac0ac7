"""Quoter: predicts when the first token of a request would come, and what its place costs others. Pure.

Runs on the event loop, or any one thread, while the engine's thread works: it reads what LoadRecorder has published and
waits for nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.core.admission import SHORT_PART
from engine.core.cost_model import CostModel
from engine.core.memory.needs import MemoryNeeds
from engine.core.prefill_scheduler import OLDEST_PER_OTHER_S
from engine.core.prompt_queue import queue_rank
from engine.core.quoting.known_prefixes import CachedTokens
from engine.core.quoting.load import EngineLoad, LoadRecorder, PromptLeft
from engine.placement import CachedSnapshot, Question, Quote, Refusal

ESTIMATE_MARGIN = 1.1
"""A prompt is refused as too long only if its estimated tokens exceed the limit by this factor."""

MAX_WAIT_GROWTH_S = 2.0
"""A booking is answered with a new quote if the wait has grown by more than this since the last one."""

MAX_QUOTES = 1024
"""Quotes that are remembered until their requests are booked."""

OTHER_CONVERSATION = -1
"""No conversation has this key."""

BOOKING_S = 150.0
"""A booking whose request has not arrived after so many seconds ends."""

NUM_STATES = 2
"""Snapshots of a conversation whose recurrent states are kept: after its last prompt and its last answer."""


@dataclass(slots=True)
class Booking:
    """A request that will arrive."""

    question: Question
    num_cached: int
    """Tokens of its prompt that were cached when it was booked."""
    expires_s: float
    is_sent: bool = False
    """Whether the request is on its way to the engine's thread."""


class Bookings:
    """Requests that an ingress has placed here and that have not arrived yet. Belongs to the event loop.

    Args:
        clock: Returns monotonic seconds.
        arrived: Request ids that the engine's thread has taken lately.
    """

    def __init__(self, clock: Callable[[], float], arrived: Container[str]):
        self._clock = clock
        self._arrived = arrived
        self._bookings: OrderedDict[str, Booking] = OrderedDict()  # by request id, in the order of their ends

    def add(self, question: Question, num_cached: int) -> None:
        """Book a request; a booking with the same id is replaced."""
        self._bookings.pop(question.request_id, None)
        self._bookings[question.request_id] = Booking(question, num_cached, self._clock() + BOOKING_S)

    def sent(self, request_id: str, engine_id: str) -> None:
        """Keep the booking of a request until it arrives at the engine's thread, under another id there."""
        if (booking := self._bookings.pop(request_id, None)) is not None:
            booking.is_sent = True
            self._bookings[engine_id] = booking

    def remove(self, request_id: str) -> None:
        """End a booking. Unknown ids are ignored."""
        self._bookings.pop(request_id, None)

    def open(self) -> list[Booking]:
        """Return the bookings of requests that have not arrived, the oldest first."""
        if not self._bookings:
            return []
        now = self._clock()
        for request_id in [
            request_id
            for request_id, booking in self._bookings.items()
            if booking.expires_s <= now or request_id in self._arrived
        ]:
            del self._bookings[request_id]
        return list(self._bookings.values())


class Quoter:
    """Answers questions and takes bookings.

    Args:
        config: The engine's configuration.
        clock: Returns monotonic seconds; called on several threads.
        costs: Predicts seconds.
        needs: Bytes of requests, and the limit.
        recorder: The engine's work.
        is_caching: Whether the engine has a prefix cache.
        is_fetching: Whether it fetches from the caches of other nodes.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        costs: CostModel,
        needs: MemoryNeeds,
        recorder: LoadRecorder,
        is_caching: bool,
        is_fetching: bool = False,
    ):
        self._config = config
        self._clock = clock
        self._costs = costs
        self._needs = needs
        self._memory_costs = needs.costs
        self._recorder = recorder
        self._is_caching = is_caching
        self._is_fetching = is_fetching
        self._max_row_tokens = needs.max_row_tokens()
        self._waits: OrderedDict[str, float] = OrderedDict()  # request id -> wait of the last quote
        self.bookings = Bookings(clock, recorder.arrived)

    @property
    def num_booked(self) -> int:
        """Choices of booked requests that have not been sent."""
        return sum(booking.question.num_choices for booking in self.bookings.open() if not booking.is_sent)

    def quote(self, question: Question) -> Quote:
        """Predict the seconds of a request, if it were placed here now."""
        if question.num_tokens > ESTIMATE_MARGIN * self._max_row_tokens:
            return self.refuse(question, "memory")
        load, bookings = self._recorder.load, self.bookings.open()
        cached = self._recorder.prefixes.cached(question.keys, question.num_tokens - 1)
        quote = self._priced(question, cached, load, bookings)
        other = replace(question, keys=replace(question.keys, conversation=OTHER_CONVERSATION))
        with_it = self._priced(question, cached, load, [*bookings, Booking(other, cached.num_tokens, 0.0)])
        quote = replace(quote, next_s=max(0.0, with_it.seconds - quote.seconds))
        self._waits[question.request_id] = quote.wait_s
        if len(self._waits) > MAX_QUOTES:
            self._waits.popitem(last=False)
        return quote

    def _priced(self, question: Question, cached: CachedTokens, load: EngineLoad, bookings: Sequence[Booking]) -> Quote:
        """Return the quote of a request that is placed here after these bookings, without `next_s`."""
        prompt_s = self._costs.prompt_s(cached.num_tokens, question.num_tokens)
        if cached.is_on_disk:
            prompt_s += self._costs.read_s(cached.num_tokens * self._memory_costs.token_bytes)
        ahead = [*load.queued, *map(_booked, bookings)]
        return Quote(
            cached_tokens=cached.num_tokens,
            wait_s=max(self._prompts_s(question, prompt_s, load, ahead), self._rows_s(question, load, ahead)),
            prefill_s=self._beside_rows(prompt_s, load),
            slowdown_s=self._slowdown_s(question, load, ahead) + self._sharing_s(question, load, bookings),
            crowding_s=self._crowding_s(question, bookings),
            is_resident=question.keys.conversation in self._recorder.residents,
            snapshot=self._snapshot(cached),
            fetch_bytes_per_s=1.0 / self._costs.fetched_byte_s() if self._is_fetching else 0.0,
        )

    def refuse(self, question: Question, refusal: Refusal) -> Quote:
        """Return the quote of a refused request, with what other nodes may fetch for it."""
        cached = self._recorder.prefixes.cached(question.keys, question.num_tokens - 1)
        return Quote(cached_tokens=cached.num_tokens, snapshot=self._snapshot(cached), refusal=refusal)

    def book(self, question: Question) -> Quote | None:
        """Count a request as queued until it arrives, for BOOKING_S at most.

        Returns:
            None if it is booked. A new quote, and no booking, if the request is refused or its wait has grown by more
            than MAX_WAIT_GROWTH_S since the last quote; to book it nevertheless, call again.
        """
        promised_s = self._waits.get(question.request_id)
        quote = self.quote(question)
        if quote.refusal is not None:
            return quote
        if promised_s is not None and quote.wait_s > promised_s + MAX_WAIT_GROWTH_S:
            return quote
        self._waits.pop(question.request_id, None)
        self.bookings.add(question, quote.cached_tokens)
        return None

    def _snapshot(self, cached: CachedTokens) -> CachedSnapshot | None:
        if (node := cached.node) is None:
            return None
        return CachedSnapshot(node.digest, node.num_tokens, self._memory_costs.snapshot(node.num_tokens))

    # Seconds until the prompt is begun

    def _prompts_s(self, question: Question, prompt_s: float, load: EngineLoad, ahead: Sequence[PromptLeft]) -> float:
        """Return the seconds of the prompts that are computed first.

        As Admission decides: a prompt that is much shorter than those in progress passes them, except for the share of
        the oldest, and any queued prompt that is not as short. Any other prompt waits for all that rank before it.
        """
        config = self._config.scheduler
        rank = queue_rank(config, self._clock(), question.num_tokens, question.priority)
        before = [self._left_s(one) for one in ahead if one.rank <= rank]
        if config.policy == "priority":
            progress = [self._left_s(one) for one in load.in_progress if one.priority <= question.priority]
        else:
            progress = [self._left_s(one) for one in load.in_progress]
        if progress and prompt_s <= (short_s := SHORT_PART * min(progress)):
            before_s = sum(seconds for seconds in before if seconds <= short_s)
            before_s += min(progress[0], OLDEST_PER_OTHER_S * (prompt_s + before_s))
        else:
            before_s = sum(before) + sum(progress)
        if load.num_queued > len(load.queued):
            before_s *= 1 + (load.num_queued - len(load.queued)) / max(len(before), 1)
        return self._beside_rows(before_s, load)

    def _left_s(self, prompt: PromptLeft) -> float:
        return prompt.images_s + self._costs.prompt_s(prompt.start, prompt.end)

    def _beside_rows(self, seconds: float, load: EngineLoad) -> float:
        """Return how long prompts of so many seconds take while rows decode between their chunks.

        The rows of now have ended after the usual answer.
        """
        costs, num_rows = self._costs, load.num_decoding
        step_s, token_s = costs.step_s(num_rows, load.drafts), costs.token_s(num_rows)
        if not num_rows or step_s is None or token_s is None:
            return seconds
        chunk_s = costs.chunk_s(costs.busy_tokens(self._config.prefill_chunk_tokens_busy), 0)
        chunk_s = max(min(self._config.scheduler.max_stall_s, chunk_s), 1e-6)
        return seconds + min(seconds * step_s / chunk_s, load.answer_tokens * token_s)

    def _rows_s(self, question: Question, load: EngineLoad, ahead: Sequence[PromptLeft]) -> float:
        """Return the seconds until enough rows have ended, where the decode batch or its memory is full.

        Rows that are still ahead count as running: they will be, up to a full batch. The rows that decode now are taken
        to end one after the other in the time of an answer, rows that have not begun to end after a whole one, and
        memory to be freed evenly.
        """
        waiting = load.num_queued - len(load.queued) + sum(one.num_rows for one in ahead)
        num_rows = load.num_decoding + sum(one.num_rows for one in load.in_progress) + waiting
        num_running = min(num_rows, self._config.max_running)
        token_s = self._costs.token_s(num_running) if num_running else None
        if token_s is None:
            return 0.0
        missing = num_rows + question.num_choices - self._config.max_running
        room_bytes = self._needs.request_bytes
        held_bytes = load.reserved_bytes + sum(self._row_bytes(one.end, one.num_rows) for one in ahead)
        missing_bytes = held_bytes + self._row_bytes(question.num_tokens, question.num_choices) - room_bytes
        share_of_bytes = min(missing_bytes, held_bytes) / max(min(held_bytes, room_bytes), 1)
        share_of_rows = max(min(missing / max(load.num_decoding, 1), 1.0), missing / num_running)
        return max(0.0, share_of_rows, share_of_bytes) * load.answer_tokens * token_s

    def _row_bytes(self, num_tokens: int, num_rows: int = 1) -> int:
        costs = self._memory_costs
        return num_rows * costs.rows(1, costs.slots(num_tokens))

    # What its place costs

    def _slowdown_s(self, question: Question, load: EngineLoad, ahead: Sequence[PromptLeft]) -> float:
        num_others = load.num_decoding + sum(one.num_rows for one in (*load.in_progress, *ahead))
        num_rows = min(num_others + question.num_choices, self._config.max_running)
        token_s, alone_s = self._costs.token_s(num_rows), self._costs.token_s(1)
        if token_s is None or alone_s is None:
            return 0.0
        num_tokens = min(load.answer_tokens, question.max_tokens or load.answer_tokens)
        return max(0.0, token_s - alone_s) * num_tokens

    def _sharing_s(self, question: Question, load: EngineLoad, bookings: Sequence[Booking]) -> float:
        """Return the seconds that a newcomer's turns to come wait for the turns of those that live here.

        With a closed number of conversations, each turn finds the others' mean number of open requests before it (the
        arrival theorem of Reiser and Lavenberg 1980). 0 for a resident.
        """
        residents = self._recorder.residents
        if question.keys.conversation in residents:
            return 0.0
        num_new = sum(one.question.keys.conversation not in residents for one in bookings)
        mean_open = min(load.mean_open_at(self._clock()) + num_new, residents.figures.num_residents + num_new)
        return residents.figures.turns_to_come * mean_open * load.turn_s

    def _crowding_s(self, question: Question, bookings: Sequence[Booking]) -> float:
        """Return the seconds that conversations lose in turns to come if one more lives here; 0 for a resident.

        The residents, at the lengths that they may reach, and one working row share the room. The newcomer costs the
        part of it that does not fit, computed again in each turn to come.
        """
        residents, prefixes = self._recorder.residents, self._recorder.prefixes
        if not self._is_caching or question.keys.conversation in residents:
            return 0.0
        newcomers = {
            one.question.keys.conversation: one.question
            for one in bookings
            if one.question.keys.conversation not in residents
        }
        newcomers.pop(question.keys.conversation, None)
        figures, costs = residents.figures, self._memory_costs
        num_tokens = list(figures.num_tokens)
        for one in newcomers.values():
            for index, length in enumerate(residents.reach(one.num_tokens)):
                num_tokens[index] += length - prefixes.num_system_tokens(one.keys)
        num_system = min(prefixes.num_system_tokens(question.keys), question.num_tokens)
        state_bytes = NUM_STATES * costs.fixed()
        others_bytes = (figures.num_residents + len(newcomers)) * state_bytes
        shares = 0.0
        for tokens, length in zip(num_tokens, lengths := residents.reach(question.num_tokens), strict=True):
            own = (length - num_system) * costs.token_bytes + state_bytes
            used = tokens * costs.token_bytes + others_bytes + self._row_bytes(int(length))
            over = max(0.0, used + own - self._needs.request_bytes)
            shares += min(1.0, over / own) if own else 0.0  # a prompt without bytes takes no room from others
        again_s = self._costs.prompt_s(num_system, question.num_tokens)
        return shares / len(lengths) * again_s * figures.turns_to_come


def _booked(booking: Booking) -> PromptLeft:
    question = booking.question
    end = max(question.num_tokens, 1)
    return PromptLeft(min(booking.num_cached, end - 1), end, question.num_choices, question.priority, float("-inf"))
