"""Loans: keys and values of snapshots that are in the caches of the rows that continue them, and nowhere else.

A row that continues a conversation needs all its keys and values in its own cache. If nothing else needs the stretches
at the end of the snapshot, they move there, and move back when the row ends, is aborted or is preempted: they are in
memory once. What other prompts need as well, system prompts for example, is copied and stays.

A loan begins with the admission of the row, whose reservation has room for all of its tokens: from then on the lent
bytes count as the row's (`promise`). They move when the prompt begins (`lend`). The snapshots that it leaves at its
boundaries are lent from the beginning (`add`). A prompt that continues a lent snapshot gets a copy from the row
(`call_in`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.node import Entry, Held, Stretch


class Loans:
    """Which stretches are lent to which row; the bytes are counted by the cache."""

    def __init__(self, cache: PrefixCache, runner: ModelRunner):
        self._cache = cache
        self._runner = runner
        self._of_row: dict[str, list[Held]] = {}  # by row id, in the order of the tokens
        self._leaving: list[tuple[Held, list[Held]]] = []  # first of a chain, and those that are written before it goes

    @property
    def row_ids(self) -> list[str]:
        """Those that something is lent or promised to."""
        return list(self._of_row)

    def promise(self, row_id: str, entry: Entry) -> bool:
        """Count what the row will probably continue as the row's, before it has begun; False if that is nothing."""
        if row_id in self._of_row:
            return True
        return bool(self._lend(row_id, entry))

    def cancel(self, row_id: str) -> None:
        """Count as the cache's again what the row has been promised, and has not got.

        The row keeps what it has: it may be a row that was preempted, and that the runner has not dropped yet.
        """
        self._take_back_promised(row_id)

    def break_promise(self, row_id: str) -> None:
        """The same for a row that was admitted: others are evicted if that is more than there is room for."""
        if self._take_back_promised(row_id):
            self._cache.fit()

    def lend(self, row_id: str, entry: Entry) -> list[Stretch]:
        """Return the stretches that move into the row's cache, which is about to continue this entry."""
        was_promised = self._take_back_promised(row_id)
        lent = self._lend(row_id, entry, was_promised and self._lacks_room(entry))
        if was_promised:  # perhaps more than it gets: another prompt may continue the same snapshot by now
            self._cache.fit(spared=(entry,))
        return [held.stretch for held in lent]

    def _take_back_promised(self, row_id: str) -> bool:
        """False if nothing was promised."""
        helds = self._pop(row_id)
        promised = [held for held in helds if not held.stretch.is_lent]
        for held in promised:
            self._cache.take_back(held)
        if len(promised) < len(helds):
            self._of_row[row_id] = [held for held in helds if held.stretch.is_lent]
        return bool(promised)

    def _lacks_room(self, entry: Entry) -> bool:
        """Whether the cache has no room for what is not lent of an entry: it was read from disk for the row alone."""
        lendable = sum(held.stretch_bytes for held in self._cache.lendable(entry.held))
        return self._cache.missing_bytes > lendable

    def _lend(self, row_id: str, entry: Entry, also_system: bool = False) -> list[Held]:
        assert entry.held is not None
        lent = list(self._cache.lendable(entry.held, also_system))[::-1]
        for held in lent:
            self._cache.lend(held, row_id, held.stretch_bytes)
        if lent:
            self._of_row[row_id] = lent
        return lent

    def add(self, row_id: str, held: Held, num_bytes: int) -> None:
        """A snapshot of the row's prompt whose own stretch, of about so many bytes, has never been anywhere else."""
        self._cache.lend(held, row_id, num_bytes)
        self._of_row.setdefault(row_id, []).append(held)

    def may_add(self, row_id: str, base: Held | None) -> bool:
        """Whether a stretch behind `base` would be the next of what is lent to the row."""
        lent = self._of_row.get(row_id)
        return not lent or (base is not None and lent[-1] in self._cache.chain(base.entry))

    def call_in(self, entry: Entry) -> bool:
        """Copy what is lent of an entry's chain from the rows; False if there is no room for it."""
        lent = [held for held in self._cache.chain(entry) if held.stretch.is_lent]
        if not lent:
            return True
        if not self._cache.make_way_back(lent):
            return False
        by_row = defaultdict[str | None, list[Held]](list)
        for held in lent:
            by_row[held.lent_to].append(held)
        for row_id, helds in by_row.items():
            if row_id is not None:
                self._fill(row_id, helds)
            self._settle(helds)
        return not any(held.stretch.is_lent for held in lent)

    def _fill(self, row_id: str, helds: Sequence[Held]) -> None:
        """Copy stretches back from a row. If the runner raises, those that were not copied stay lent."""
        try:
            self._runner.fill(row_id, [held.stretch for held in helds])
        except Exception:
            helds = [held for held in helds if not held.stretch.is_lent]
            self._settle(helds)
            raise
        finally:
            left = [held for held in self._pop(row_id) if held not in helds]
            if left:
                self._of_row[row_id] = left

    def returning(
        self, row_ids: Iterable[str], is_to_write: Callable[[Entry], bool] = lambda entry: False
    ) -> dict[str, Sequence[Stretch]]:
        """Make room for what is lent to rows that leave; return the stretches that are to be filled, by row id.

        What is worth less than what would have to be evicted for it is forgotten, from the end of the row on, once what
        is to be written of it has been filled, too. `settle` must follow, and then `take_leaving`.
        """
        returning = {}
        for row_id in row_ids:
            self.break_promise(row_id)
            lent, leaving = self._pop(row_id), list[Held]()
            while lent and not self._cache.make_way_back(lent):
                leaving.insert(0, lent.pop())
                if not self._to_write(leaving, is_to_write):
                    self._cache.evict_behind(leaving.pop())
                    lent = [held for held in lent if self._cache.is_stored(held)]
            for held in lent:  # counted at once: the next row needs other room
                self._cache.take_back(held)
            if lent:
                self._of_row[row_id] = list(lent)
            if leaving:
                to_write = self._to_write(leaving, is_to_write)
                self._leaving.append((leaving[0], to_write))
                lent += to_write
            if lent:
                returning[row_id] = [held.stretch for held in lent]
        return returning

    @staticmethod
    def _to_write(leaving: Sequence[Held], is_to_write: Callable[[Entry], bool]) -> list[Held]:
        """Those at the end of a chain that are written before they go."""
        return [held for held in leaving if held.snapshot is not None and is_to_write(held.entry)]

    def take_leaving(self, write: Callable[[Entry], None]) -> None:
        """Write what was filled of the chains that the cache has no room for, and evict them."""
        leaving, self._leaving = self._leaving, []
        for first, to_write in leaving:
            for held in to_write:
                if held.snapshot is not None and not held.stretch.is_lent:
                    write(held.entry)
            if self._cache.is_stored(first):
                self._cache.evict_behind(first)

    def settle(self, row_ids: Iterable[str]) -> None:
        """The rows are gone, or have failed: what has not come back is lost, and so is all that is behind it."""
        self._settle([held for row_id in row_ids for held in self._pop(row_id)])

    def _settle(self, helds: Sequence[Held]) -> None:
        for held in helds:
            if held.stretch.is_lent:
                self._cache.evict_behind(held)
            else:
                self._cache.take_back(held)

    def _pop(self, row_id: str) -> list[Held]:
        """Those of a row's loans that are still stored."""
        return [held for held in self._of_row.pop(row_id, ()) if self._cache.is_stored(held)]
