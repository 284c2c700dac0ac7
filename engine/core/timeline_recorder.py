"""Records the phases of a row while it is in the engine."""

from engine.cache_miss import CacheMiss
from engine.timeline import (
    MAX_PHASES,
    Compiling,
    Decoded,
    EncodedImage,
    Obstacle,
    Phase,
    Prefilled,
    Queued,
)


class TimelineRecorder:
    """The timeline of a row in the making. Times are seconds on the engine's clock.

    The phases follow the row's life cycle: `queued`, `admitted`, `joined`, then perhaps `queued` again.

    Args:
        arrived_s: When the request arrived in the engine.
        has_grammar: Whether a grammar is compiled for it.
    """

    def __init__(self, arrived_s: float, has_grammar: bool = False):
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_preemptions = 0
        self._arrived_s = self._began_s = arrived_s
        self._phases: list[Phase] = [Compiling(has_grammar=has_grammar)]
        self._phase: Phase = self._phases[0]
        self._decoded: Decoded | None = None  # the last phase of this kind: a step may end after a preemption
        self._stall_base_s = 0.0

    def queued(self, now: float, phase: Queued) -> None:
        """Begin to wait in the queue. phase: its own, which changes from now on."""
        self.num_preemptions += phase.preempted_by is not None
        self._begin(now, phase)

    def blocked(self, obstacle: Obstacle) -> None:
        """Note why the row could not be admitted now."""
        if isinstance(self._phase, Queued):
            self._phase.obstacle = obstacle

    def admitted(self, now: float) -> None:
        """Begin the prefill."""
        self._begin(now, Prefilled())

    def restored(self, num_cached: int, saved_s: float, miss: CacheMiss | None) -> None:
        """Note the cached prefix."""
        if isinstance(self._phase, Prefilled):
            self._phase.num_cached, self._phase.saved_s, self._phase.miss = num_cached, saved_s, miss

    def encoded(self, num_patches: int, seconds: float, is_new: bool) -> None:
        """Add a piece of an image. is_new: it is the image's first piece."""
        if not isinstance(self._phase, Prefilled):
            return
        if is_new or not self._phase.images:
            self._phase.images.append(EncodedImage(num_patches=num_patches, seconds=0.0))
        self._phase.images[-1].seconds += seconds

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Add a chunk of the prompt."""
        if isinstance(self._phase, Prefilled):
            self._phase.num_chunks += 1
            self._phase.num_tokens += num_tokens
            self._phase.chunks_s += seconds

    def joined(self, now: float, prefill_s: float) -> None:
        """Begin to decode. prefill_s: seconds that the engine has spent on prompts so far."""
        self._decoded = Decoded()
        self._begin(now, self._decoded)
        self._stall_base_s = prefill_s

    def token(self, now: float) -> float | None:
        """Note that tokens are published. Returns when that was the last time, None if they are the first."""
        before = self.last_token_s
        self.last_token_s = now - self._arrived_s
        if before is None:
            self.first_token_s = self.last_token_s
            return None
        return before + self._arrived_s

    def stepped(self, num_tokens: int, num_drafted: int, num_accepted: int, prefill_s: float) -> None:
        """Add a decode step. prefill_s: see `joined`."""
        if (phase := self._decoded) is not None:
            phase.num_steps += 1
            phase.num_tokens += num_tokens
            phase.num_drafted += num_drafted
            phase.num_accepted += num_accepted
            phase.stalled_s = prefill_s - self._stall_base_s

    def end(self, now: float) -> tuple[tuple[Phase, ...], float]:
        """Return the phases, at most the first MAX_PHASES, and the seconds of all since the arrival."""
        self._close(now)
        return tuple(self._phases), now - self._arrived_s

    def _begin(self, now: float, phase: Phase) -> None:
        self._close(now)
        self._phase, self._began_s = phase, now
        if len(self._phases) < MAX_PHASES:
            self._phases.append(phase)

    def _close(self, now: float) -> None:
        self._phase.seconds = now - self._began_s
