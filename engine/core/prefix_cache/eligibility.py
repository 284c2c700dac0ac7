"""Eligibility: which tokens of a row may come from the prefix cache, and what of the row it may store or lend."""

from collections.abc import Sequence

import numpy as np

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.request import Request
from engine.protocol import EngineRequest


class Eligibility:
    """Says how rows may use the prefix cache, and by which keys.

    Args:
        runner: The model that the keys belong to.
        off_reason: Why nothing is cached, None if snapshots are cached.
    """

    def __init__(self, runner: ModelRunner, off_reason: str | None):
        self._runner = runner
        self.off_reason = off_reason

    def uses_cache(self, row: Request) -> bool:
        """Return whether a row's prompt may continue from a snapshot."""
        return self.off_reason is None and row.spec.pooling is None

    def may_lend(self, rows: Sequence[Request]) -> bool:
        """Return whether KV segments may move to the row that continues them."""
        spec = rows[0].spec
        return self.uses_cache(rows[0]) and len(rows) == spec.num_choices == 1 and spec.sparse is None

    def may_keep(self, row: Request) -> bool:
        """Return whether the state after a row's last token may be stored."""
        spec = row.spec
        return self.uses_cache(row) and spec.num_choices == 1 and spec.sparse is None and not spec.pinned

    @staticmethod
    def max_tokens(row: Request, key: PromptKey) -> int:
        """Return the length in tokens of the longest prefix to restore.

        The last token must be computed for its logits, and a sparse plan has gaps after its dense tokens.
        """
        most = len(key) if row.spec.sparse is None else row.num_dense_tokens
        return min(most, len(key) - 1)

    def key_of(self, row: Request) -> PromptKey:
        """Return the key of a row's prompt, cached on the row until its prompt grows."""
        key = row.prompt_key
        if key is None or len(key) != row.num_tokens + row.num_skipped:
            key = row.prompt_key = self.key(row.spec, row.prompt_token_ids)
        return key

    def key(self, spec: EngineRequest, token_ids: np.ndarray) -> PromptKey:
        """Return the key of tokens that begin with a request's prompt."""
        runner = self._runner
        return PromptKey.of(runner.fingerprint, spec.tenant, token_ids, spec.images, runner.image_token_id)
