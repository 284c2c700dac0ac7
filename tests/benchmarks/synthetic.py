"""The real graph around a step that computes nothing: a runner that gives every row one token at a fixed pace."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from ray import serve
from ray.serve import Application

from deployments.app import AppArgs, build_app
from deployments.model_replica import ModelReplica
from engine import async_engine
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PrefillOutput, RowOutput
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from tests.support.fake_runner import NoSnapshots

STEPS_PER_S = 50.0

LETTER = "a"
"""The text of every token: the client counts tokens by counting letters."""


class PacedRunner(NoSnapshots):
    """Steps at the ticks of a clock; a tick that was missed is left out.

    spread: the rows take turns, evenly over the time of a step, instead of all at once.
    emissions: for each row, by its seed, the time.monotonic() of every token.
    """

    def __init__(self, token_id: int):
        self.max_context_tokens = self.vocab_size = self.num_embeddings = 1 << 20
        self.capabilities: dict[str, Any] = {}
        self.emissions: dict[int, list[float]] = {}
        self._output = RowOutput((token_id,))
        self._tick = 0.0
        self._turns = itertools.count()
        self.spread = False
        self._rows: dict[str, list[float]] = {}

    def decode(self, drafts: Drafts = PLAIN) -> Mapping[str, RowOutput]:
        rows = list(self._rows)
        if self.spread:
            rows = [rows[next(self._turns) % len(rows)]]
        self._tick = max(self._tick + len(rows) / len(self._rows) / STEPS_PER_S, time.monotonic())
        time.sleep(max(0.0, self._tick - time.monotonic()))
        now = time.monotonic()
        for row in rows:
            self._rows[row].append(now)
        return dict.fromkeys(rows, self._output)

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        for row in rows:
            self._rows[row.id] = self.emissions[row.sampling.seed] = [time.monotonic()]
        num_tokens = rows[0].prompt.num_left
        return PrefillOutput(num_tokens, {row.id: self._output for row in rows})

    def reset(self) -> None:
        self._rows.clear()

    def drop(self, row_ids: Sequence[str], lent: Any = None) -> None:
        for row_id in row_ids:
            self._rows.pop(row_id, None)

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def make_paced_runner(config: EngineConfig, _progress: Callable[[float], None]) -> PacedRunner:
    [token_id] = ChatTokenizer(resolve_checkpoint(config.model, config.revision, weights=False)).encode_text(LETTER)
    return PacedRunner(int(token_id))


_Replica: Any = ModelReplica.func_or_class


@serve.deployment()
class SyntheticReplica(_Replica):
    """ModelReplica with the paced runner in its engine."""

    async def __init__(self, config: EngineConfig):
        def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> PacedRunner:
            self._runner = make_paced_runner(config, progress)
            return self._runner

        async_engine.MESSAGE_S = 0.0  # each token is a message of its own: what a message costs is measured
        cacheless = config.prefix_cache.model_copy(update={"enabled": False})
        self._engine = AsyncEngine(config.model_copy(update={"prefix_cache": cacheless}), make_runner)
        await self._engine.wait_ready()

    async def set_spread(self, spread: bool) -> None:
        self._runner.spread = spread

    async def take_emissions(self) -> dict[int, list[float]]:
        """Return the emission times of the requests since the last call; none may be running."""
        emissions, self._runner.emissions = self._runner.emissions, {}
        return emissions


def build_synthetic_app(args: AppArgs) -> Application:
    """Bind the graph of build_app, except for the replica with the engine."""
    with patch("deployments.app.ModelReplica", SyntheticReplica):
        return build_app(args)
