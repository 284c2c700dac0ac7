"""Residents: the conversations that an engine has computed lately, and the memory that they will need. Pure.

The engine thread writes; other threads read `figures` and ask single keys.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.placement import ConversationKeys, Residence

RESIDENT_S = 900.0
"""A conversation lives where it was computed within so many seconds."""

MAX_RESIDENTS = 1024

GROWTH = (1.25, 1.5, 2.0)
"""Lengths that a conversation may reach, relative to its present one, while no longer ones have ended: equally likely.
Which of them comes true is unknown, so that a quote weighs each."""

MAX_FINAL_LENGTHS = 64
"""Final lengths that are remembered."""

PRIOR_WEIGHT = 4.0
"""How many ended conversations count as much as the assumptions, GROWTH and TURNS_TO_COME."""

TURNS_TO_COME = 5.0
"""Assumed turns of a conversation after the present one."""


@dataclass(slots=True)
class Resident:
    """A conversation that has been computed lately."""

    keys: ConversationKeys
    num_tokens: int
    """Tokens of its last prompt and answer."""
    system_tokens: int
    """Tokens of its system part."""
    num_turns: int
    seen_s: float
    own_tokens: tuple[float, ...] = ()
    """Its share of ResidentFigures.num_tokens, without its system part."""


@dataclass(frozen=True, slots=True)
class ResidentFigures:
    """Sums over the residents. Shared system parts count once."""

    num_residents: int = 0
    num_tokens: tuple[float, ...] = (0.0,) * len(GROWTH)
    """Tokens that all residents together will have, by the length that each reaches."""
    turns_to_come: float = TURNS_TO_COME
    """Expected turns of a conversation after the present one."""


class Residents:
    """Notes conversations.

    Args:
        clock: Returns monotonic seconds.

    Attributes:
        figures: Sums over the residents, as of the last change.
    """

    def __init__(self, clock: Callable[[], float]):
        self.figures = ResidentFigures()
        self._clock = clock
        self._residents: OrderedDict[int, Resident] = OrderedDict()  # by conversation, least recently seen first
        self._final_lengths: list[int] = []  # ascending
        self._oldest_lengths: list[int] = []  # the same in the order of their ends
        self._turns, self._num_ended = 0.0, 0.0  # fading sums
        self._sums = [0.0] * len(GROWTH)  # of own_tokens
        self._systems: dict[int, list[int]] = {}  # key of a system part -> its residents, its tokens
        self._system_tokens = 0

    def arrived(self, keys: ConversationKeys, num_tokens: int, system_tokens: int) -> None:
        """Note a turn whose prompt has so many tokens."""
        self._remove_ended()
        before = self._residents.get(keys.conversation)
        num_turns = 1 if before is None else before.num_turns + 1
        if before is not None:
            self._count(before, -1)
        resident = Resident(keys, num_tokens, system_tokens, num_turns, self._clock())
        self._residents[keys.conversation] = resident
        self._residents.move_to_end(keys.conversation)
        self._count(resident, 1)
        self._publish()

    def answered(self, keys: ConversationKeys, num_tokens: int) -> None:
        """Note that the last turn has an answer; prompt and answer have so many tokens."""
        resident = self._residents.get(keys.conversation)
        if resident is not None:
            self._count(resident, -1)
            resident.num_tokens, resident.seen_s = num_tokens, self._clock()
            self._residents.move_to_end(keys.conversation)
            self._count(resident, 1)
            self._publish()

    def residence_of(self, conversation: int | None) -> Residence | None:
        """Return what another node needs to know of a conversation; None if it does not live here."""
        if conversation is None or conversation not in self:
            return None
        resident = self._residents[conversation]
        return Residence(resident.keys, resident.num_tokens, resident.system_tokens, resident.num_turns)

    def moved_here(self, residence: Residence) -> None:
        """Note a conversation that has lived at another node until now; one that is here already stays as it is."""
        if residence.keys.conversation not in self:
            self.arrived(residence.keys, residence.num_tokens, residence.system_tokens)
            self._residents[residence.keys.conversation].num_turns = residence.num_turns

    # On any thread.

    def __contains__(self, conversation: int) -> bool:
        resident = self._residents.get(conversation)
        return resident is not None and resident.seen_s >= self._clock() - RESIDENT_S

    def reach(self, num_tokens: int) -> list[float]:
        """Return the lengths that a conversation of this length may reach, each as likely as the others."""
        lengths = self._final_lengths
        first = bisect_left(lengths, num_tokens)
        num_longer = len(lengths) - first
        if not num_longer:
            return [growth * num_tokens for growth in GROWTH]
        mean = max(GROWTH[0] * num_tokens, sum(lengths[first:]) / num_longer)
        weight = num_longer / (num_longer + PRIOR_WEIGHT)
        return [weight * mean + (1 - weight) * growth * num_tokens for growth in GROWTH]

    # On the engine's thread.

    def _count(self, resident: Resident, sign: int) -> None:
        """Add a resident to the sums, or take it out again."""
        if sign > 0:
            resident.own_tokens = tuple(length - resident.system_tokens for length in self.reach(resident.num_tokens))
        for index, num_tokens in enumerate(resident.own_tokens):
            self._sums[index] += sign * num_tokens
        shared = self._systems.setdefault(resident.keys.system, [0, 0])
        shared[0] += sign
        if shared[1] < resident.system_tokens:
            self._system_tokens += resident.system_tokens - shared[1]
            shared[1] = resident.system_tokens
        if not shared[0]:
            self._system_tokens -= shared[1]
            del self._systems[resident.keys.system]

    def _remove_ended(self) -> None:
        """Remove the conversations that are no residents any more."""
        oldest_s = self._clock() - RESIDENT_S
        while self._residents:
            resident = next(iter(self._residents.values()))
            if resident.seen_s >= oldest_s and len(self._residents) <= MAX_RESIDENTS:
                break
            del self._residents[resident.keys.conversation]
            self._count(resident, -1)
            self._ended(resident)

    def _publish(self) -> None:
        """Publish the sums over the residents."""
        self._remove_ended()
        turns = (TURNS_TO_COME * PRIOR_WEIGHT + self._turns) / (PRIOR_WEIGHT + self._num_ended)
        num_tokens = tuple(each + self._system_tokens for each in self._sums)
        self.figures = ResidentFigures(len(self._residents), num_tokens, turns)

    def _ended(self, resident: Resident) -> None:
        lengths = self._final_lengths.copy()  # readers may use the old list
        self._oldest_lengths.append(resident.num_tokens)
        if len(self._oldest_lengths) > MAX_FINAL_LENGTHS:
            lengths.remove(self._oldest_lengths.pop(0))
        insort(lengths, resident.num_tokens)
        self._final_lengths = lengths
        fading = 1 - 1 / MAX_FINAL_LENGTHS
        self._turns = fading * self._turns + resident.num_turns - 1
        self._num_ended = fading * self._num_ended + 1
