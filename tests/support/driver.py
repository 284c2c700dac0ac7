"""Drives an EngineCore step by step and collects what it publishes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.row import Row
from engine.core.runner import ModelRunner
from engine.core.scheduler_output import Published
from engine.protocol import EngineRequest, FinishReason, TokenChunk


def fix_prefill_costs(core: EngineCore, forward_s: float, token_s: float) -> None:
    """Predict these seconds of a forward and of each of its tokens from now on, whatever is measured."""
    core.costs.record_chunk(10, 0, 0.01)
    core.costs._chunks.coefficients = np.array([forward_s, token_s, 0.0])
    core.costs.record_chunk = lambda *args: None  # type: ignore[method-assign]


def encode_images(runner: ModelRunner, row: Row) -> None:
    """Encode all images of a prompt, as EngineCore does before its first chunk."""
    while (image := runner.next_image([row])) is not None:
        runner.encode([row], image.num_blocks)


class Driver:
    """An EngineCore whose publications are collected: tokens, chunks and finish reason of every row.

    A request's first choice goes by the id of the request, the others by that of the row: "r", "r/1", "r/2".
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig | None = None,
        clock: Callable[[], float] | None = None,
        poll: Callable[[EngineCore], None] | None = None,
    ):
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.chunks: dict[str, list[TokenChunk]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}
        more: dict[str, Any] = {} if clock is None else {"clock": clock}
        more |= {} if poll is None else {"poll": poll}
        self.core = EngineCore(config or EngineConfig(), runner, self._publish, **more)

    def _publish(self, chunks: Published) -> None:
        for row_id, chunk in chunks.items():
            request_id, _, index = row_id.rpartition("/")
            assert chunk.index == int(index)
            name = row_id if chunk.index else request_id
            if chunk.finish_reason is FinishReason.ABORT:  # the caller's own wish
                assert chunk.timeline is not None and not chunk.token_ids
                continue
            assert name not in self.finish, "nothing comes after the last chunk"
            assert chunk.token_ids or chunk.finish_reason, "no chunk is empty"
            self.chunks[name].append(chunk)
            self.tokens[name] += chunk.token_ids
            if chunk.finish_reason is not None:
                self.finish[name] = chunk.finish_reason
                self.errors[name] = chunk.error

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
