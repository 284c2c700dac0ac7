"""choose_pooling: selects the pooling of embeddings from the settings and the checkpoint."""

from pathlib import Path
from typing import Any

from engine.config import EmbeddingConfig, Pooling
from engine.processing.checkpoint import read_optional_json
from engine.protocol import EngineFailed

POOLING_FILE = "1_Pooling/config.json"
PREFIX = "pooling_mode_"
SUPPORTED: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""Mode of sentence-transformers (a key without PREFIX, or the value of `pooling_mode`) to its pooling."""


def choose_pooling(config: EmbeddingConfig, model_dir: Path) -> Pooling:
    """Return the configured pooling, else the checkpoint's, else `last`.

    Raises:
        EngineFailed: The checkpoint has an unsupported pooling, or layers after it.
    """
    if config.pooling != "auto":
        return config.pooling
    dense = sorted(path.name for path in model_dir.glob("*_Dense"))
    if dense:
        raise EngineFailed(
            f"the checkpoint has layers after its pooling ({dense[0]}), which are not run; set embedding.pooling to "
            "last or mean to get embeddings without them"
        )
    modes = _modes(read_optional_json(model_dir / POOLING_FILE))
    unsupported = [mode for mode in modes if mode not in SUPPORTED]
    if unsupported or len(modes) > 1:
        raise EngineFailed(
            f"the checkpoint's {POOLING_FILE} selects the pooling {' and '.join(modes)}; exactly one of "
            f"{' and '.join(SUPPORTED)} is supported: set embedding.pooling to last or mean"
        )
    return SUPPORTED[modes[0]] if modes else "last"


def _modes(pooling: dict[str, Any]) -> list[str]:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return [mode]
    return [name.removeprefix(PREFIX) for name, is_on in pooling.items() if name.startswith(PREFIX) and is_on is True]
