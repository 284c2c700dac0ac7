"""Which tokens of a row may come from the prefix cache, what of the row it may store or lend, and the row's key."""

from collections.abc import Sequence

import numpy as np

from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.row import Row
from engine.core.runner import ModelRunner
from engine.protocol import EngineRequest


def may_lend(rows: Sequence[Row]) -> bool:
    """Return whether KV segments may move to the row that continues them."""
    spec = rows[0].spec
    return spec.pooling is None and len(rows) == spec.num_choices == 1 and spec.sparse is None


def may_keep(row: Row) -> bool:
    """Return whether the state after a row's last token may be stored."""
    spec = row.spec
    return spec.pooling is None and spec.num_choices == 1 and spec.sparse is None and not spec.pinned


def max_tokens(row: Row, key: PromptKey) -> int:
    """Return the length in tokens of the longest prefix to restore.

    The last token must be computed for its logits, and a sparse plan has gaps after its dense tokens.
    """
    most = len(key) if row.spec.sparse is None else row.num_dense_tokens
    return min(most, len(key) - 1)


def key_of(row: Row, runner: ModelRunner) -> PromptKey:
    """Return the key of a row's prompt, cached on the row until its prompt grows."""
    key = row.prompt_key
    if key is None or len(key) != row.num_tokens + row.num_skipped:
        key = row.prompt_key = key_of_tokens(row.spec, row.prompt_token_ids, runner)
    return key


def key_of_tokens(spec: EngineRequest, token_ids: np.ndarray, runner: ModelRunner) -> PromptKey:
    """Return the key of tokens that begin with a request's prompt."""
    return PromptKey.of(runner.fingerprint, spec.tenant, token_ids, spec.images, runner.image_token_id)
