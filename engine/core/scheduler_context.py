"""SchedulerContext: what all parts of the scheduler are given. The scheduler itself creates the rest."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.core.cost_model import CostModel
from engine.core.memory.budget import Evictable, MemoryBudget
from engine.core.prompt import Prompt
from engine.core.row import Row


class Prefixes(Protocol):
    """Looks up cached prefixes of prompts, see core/prefix_cache/cache.py."""

    def num_cached(self, row: Row) -> int:
        """Return how many tokens of a row's prompt are cached."""
        ...

    def source_of(self, prompt: Prompt, in_progress: Iterable[Prompt]) -> Prompt | None:
        """Return the prompt in progress that will soon cache a longer prefix of this prompt than is cached now.

        Returns None without one.
        """
        ...

    def assign(self, prompt: Prompt) -> None:
        """Count the cached keys and values that a queued prompt will take over as its request's memory."""
        ...

    def revoke(self, prompt: Prompt) -> None:
        """Undo `assign` for a prompt that is not admitted."""
        ...


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """Limits, predictions, memory and caches that scheduling decisions depend on."""

    config: EngineConfig
    """The engine's configuration."""
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    costs: CostModel
    """Predicts seconds from what has been measured. The engine core records decode steps, PrefillScheduler chunks and
    images, and the prefix cache what it reads from disk and other nodes."""
    budget: MemoryBudget
    """Memory reserved for rows and prompts."""
    evictable: Evictable
    """Cached memory that may be evicted for a request, a row or a chunk."""
    prefixes: Prefixes
    """Cached prefixes of prompts."""
    has_bursts: bool
    """Whether several prompts can be computed in one forward."""
    whole_image_token: int | None = None
    """The placeholder of images that no chunk may divide; None if there are none."""
    whole_prompts: bool = False
    """Whether each prompt is one chunk, see ModelRunner.whole_prompts."""
