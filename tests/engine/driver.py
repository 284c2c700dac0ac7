"""Drives an EngineCore step by step and collects what it publishes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from engine.config import EngineConfig
from engine.core.batch import ModelRunner
from engine.core.engine_core import EngineCore
from engine.core.scheduler import Chunks
from engine.protocol import EngineRequest, FinishReason


class Driver:
    """An EngineCore whose publications are collected: all tokens and the finish reason per request."""

    def __init__(self, runner: ModelRunner, config: EngineConfig | None = None):
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}
        self.core = EngineCore(config or EngineConfig(), runner, self._publish)

    def _publish(self, chunks: Chunks) -> None:
        for request_id, chunk in chunks.items():
            assert request_id not in self.finish, "nothing comes after the last chunk"
            self.tokens[request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                self.finish[request_id] = chunk.finish_reason
                self.errors[request_id] = chunk.error

    def run(
        self,
        arrivals: Mapping[int, Iterable[EngineRequest]],
        aborts: Mapping[int, Iterable[str]] | None = None,
        max_steps: int = 5000,
    ) -> dict[str, list[int]]:
        """Steps until nothing is left. arrivals and aborts: step -> what comes before that step."""
        last = max((*arrivals.keys(), *(aborts or {}).keys()))
        for step in range(max_steps):
            for request in arrivals.get(step, ()):
                self.core.add_request(request)
            for request_id in (aborts or {}).get(step, ()):
                self.core.abort(request_id)
            if not self.core.has_work and step >= last:
                return dict(self.tokens)
            self.core.step()
        raise AssertionError(f"not done after {max_steps} steps")
