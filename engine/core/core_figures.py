"""CoreFigures: an engine's figures for its status, refreshed between two steps."""

import logging
from typing import Any

from engine.core.memory.budget import MemoryBudget
from engine.core.memory.evictable import EvictableMemory
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prompt_queue import PromptQueue
from engine.core.runner import ModelRunner
from engine.core.speculation import SpeculationController
from engine.status import QueuedRequest

log = logging.getLogger("orchard.engine")


class CoreFigures:
    """Figures that any thread may read. Created and refreshed on the engine's thread.

    Args:
        runner: Its memory is read.
        prefixes: The prefix cache.
        budget: The memory budget.
        evictable: The evictable memory.
        queue: The prompts that wait.
        speculation: The controller of drafts.

    Attributes:
        memory: Bytes of the device by purpose, see ModelRunner.memory, and those of the prefix cache.
        admission: The accounts of the budget, in bytes.
        waiting: The requests in the queue, the next one first.
        pinned_bytes: Bytes of snapshots that cannot be evicted.
        speculation: Each proposer's figures, by name.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefixes: PrefixCache,
        budget: MemoryBudget,
        evictable: EvictableMemory,
        queue: PromptQueue,
        speculation: SpeculationController,
    ):
        self._runner, self._prefixes, self._budget = runner, prefixes, budget
        self._evictable, self._queue, self._speculation = evictable, queue, speculation
        self.memory = self._memory()
        self.admission: dict[str, int] = budget.status()
        self.waiting: tuple[QueuedRequest, ...] = ()
        self.pinned_bytes = 0
        self.speculation: dict[str, Any] = speculation.status()

    def refresh(self) -> None:
        """Read all figures; those of the memory stay as they are if the runner fails to read them."""
        self.speculation = self._speculation.status()
        self.waiting, self.admission = self._queue.status(self._budget.needs), self._budget.status()
        self.pinned_bytes = self._evictable.pinned_bytes
        try:
            self.memory = self._memory()
        except Exception:
            log.exception("the memory figures could not be read")

    def _memory(self) -> dict[str, int]:
        prefixes = self._prefixes
        max_bytes = prefixes.memory.max_bytes if prefixes.off_reason is None else 0
        cache_bytes = {"prefix_cache_bytes": prefixes.store.num_bytes, "prefix_cache_max_bytes": max_bytes}
        return self._runner.memory() | cache_bytes
