"""CoreRun: one EngineCore over a loaded runner, whose published tokens are collected as answers."""

from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.runner import ModelRunner
from engine.core.scheduler_output import Published
from engine.errors import EngineFailed
from engine.protocol import EngineRequest, TokenChunk
from engine.self_test.agreement import Answer
from engine.snapshot_store.files import SnapshotFiles

MAX_STEPS = 20_000


class CoreRun:
    """Runs requests through an EngineCore, step by step.

    Args:
        config: The engine's configuration.
        runner: The runner, without rows.
        files: Files of the prefix cache's disk tier; None without one.

    Attributes:
        core: The engine.
        reserved_bytes: The most bytes that the memory budget had in its accounts within any step, without bytes that it
            cannot explain.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, files: SnapshotFiles | None = None):
        self.core = EngineCore(config, runner, self._publish, files=files, poll=lambda core: self._read_accounts())
        self.reserved_bytes = 0
        self._chunks: dict[str, list[TokenChunk]] = {}

    def run(
        self, arrivals: Mapping[int, Sequence[EngineRequest]], aborts: Mapping[int, str] | None = None
    ) -> dict[str, Answer]:
        """Step until no work is left; return the answers by request id.

        Args:
            arrivals: Per step the requests that arrive before it.
            aborts: Per step the id of a request that is aborted before it.
        """
        aborts = aborts or {}
        last = max([*arrivals, *aborts])
        for step in range(MAX_STEPS):
            for request in arrivals.get(step, ()):
                self.core.add_request(request)
            if step in aborts:
                self.core.abort(aborts[step])
            if not self.core.has_work and step >= last:
                return self.answers()
            self.core.step()
        raise EngineFailed(f"the requests are not answered after {MAX_STEPS} steps")

    def answers(self) -> dict[str, Answer]:
        """Return what was published so far, by request id."""
        return {row_id.rpartition("/")[0]: answer_of(chunks) for row_id, chunks in self._chunks.items()}

    def num_tokens(self, request_id: str) -> int:
        """Return how many tokens a request has so far."""
        return sum(len(chunk.token_ids) for chunk in self._chunks.get(f"{request_id}/0", ()))

    def _publish(self, chunks: Published) -> None:
        self._read_accounts()
        for row_id, chunk in chunks.items():
            self._chunks.setdefault(row_id, []).append(chunk)

    def _read_accounts(self) -> None:
        budget = self.core.budget
        used = budget.needs.limit_bytes - budget.free_bytes - budget.unaccounted_bytes
        self.reserved_bytes = max(self.reserved_bytes, used)


def answer_of(chunks: Sequence[TokenChunk]) -> Answer:
    """Return the answer that the chunks of one choice make."""
    return Answer(
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        num_cached=max((chunk.num_cached for chunk in chunks), default=0),
        num_skipped=max((chunk.num_skipped for chunk in chunks), default=0),
        num_accepted=sum(chunk.num_accepted for chunk in chunks),
        error=next((chunk.error for chunk in chunks if chunk.error is not None), None),
    )
