"""The decode batch: every running row, one token per step, computed one step ahead of what has been read.

A step launches the forward that follows and only then reads the tokens of the one before, so that the device works
while the tokens travel. Rows join and leave between steps. A row that leaves has been computed one token too far,
which goes with its cache; a row that joins brings its first token, which its prefill has already given out.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.protocol import SamplingParams
from engine.worker import kv_cache
from engine.worker.kv_cache import RowCache
from engine.worker.sampler import Sampler
from engine.worker.view import View, evaluate

EVAL_STEPS = 64  # lazy bookkeeping of the caches is computed at least this often


@dataclass(slots=True)
class Row:
    """position: of the token that the next forward takes in. num_sampled: tokens sampled so far, launched included.

    announced: the newest token has been given out already.
    """

    request_id: str
    sampling: SamplingParams
    position: int
    num_sampled: int
    announced: bool


class DecodeBatch:
    def __init__(self, view: View):
        self._view = view
        self.clear()

    def clear(self) -> None:
        self._rows: list[Row] = []
        self._cache: kv_cache.BatchCache = []
        self._newest = mx.zeros(0, mx.int32)  # [B], maybe not computed yet
        self._sampler: Sampler | None = None
        self._steps = 0

    @property
    def num_cache_bytes(self) -> int:
        return kv_cache.num_bytes(self._cache)

    def join(self, request_id: str, sampling: SamplingParams, cache: RowCache, position: int, first: int) -> None:
        """Adds a row whose prompt is in `cache`; `first` is its first token, at logical `position`, given out.

        When it raises, the batch is as it was.
        """
        batch, token = kv_cache.to_batch(cache), mx.array([first], mx.int32)
        evaluate(batch)  # what the newcomer still owes is its own, not to be paid in a step of all rows
        if self._rows:
            batch, token = kv_cache.joined(self._cache, batch), mx.concatenate([self._newest, token])
        self._cache, self._newest = batch, token
        self._rows.append(Row(request_id, sampling, position, 1, announced=True))
        self._sampler = None

    def leave(self, request_ids: set[str]) -> None:
        """Removes these rows; others go on as if they had never been there."""
        stay = [i for i, row in enumerate(self._rows) if row.request_id not in request_ids]
        if len(stay) == len(self._rows):
            return
        if not stay:
            return self.clear()
        cache, newest = kv_cache.kept(self._cache, stay), self._newest[mx.array(stay, mx.int32)]
        self._cache, self._newest = cache, newest
        self._rows = [self._rows[i] for i in stay]
        self._sampler = None

    def step(self) -> dict[str, tuple[int, ...]]:
        """The next token of every row that has one to give, while the one after it is being computed."""
        if all(row.announced for row in self._rows):
            self._launch()
        newest = self._newest
        given_out = [row.announced for row in self._rows]
        self._launch()
        tokens = np.array(newest).tolist()
        return {
            row.request_id: (token,)
            for row, token, given in zip(self._rows, tokens, given_out, strict=True)
            if not given
        }

    def _launch(self) -> None:
        """Starts one forward for all rows: takes in the newest tokens, samples those that follow."""
        rows = self._rows
        if self._sampler is None:
            self._sampler = Sampler([row.sampling for row in rows])
        positions = np.array([row.position for row in rows], np.int32)
        logits = self._view.decode(self._newest, self._cache, positions)
        self._newest = self._sampler(logits, np.array([row.num_sampled for row in rows]))
        mx.async_eval(self._newest)
        self._steps += 1
        if self._steps % EVAL_STEPS == 0:
            evaluate(self._cache)
        for row in rows:
            row.position += 1
            row.num_sampled += 1
            row.announced = False
