"""Checks that a target gives a head the outputs of layers that it reads, and can go back to before rejected drafts."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.errors import EngineFailed
from engine.worker.heads.head import Head
from engine.worker.language_model import LanguageModel
from engine.worker.rewind import rewind_unsupported_reason


def check_outputs(kind: str, head: Head, width: int, language_model: Any, head_dir: Path) -> None:
    """Check that the family's layers return what the head reads, by a forward that is not computed.

    Args:
        kind: What the head is called in messages.
        head: The head, whose weights need not be loaded.
        width: Values that it reads of a token.
        language_model: The library's language model of the target.
        head_dir: Where the head is.

    Raises:
        EngineFailed: The head cannot draft for the target; names the reason.
    """
    target = LanguageModel(language_model, reads=[head.layer_outputs])
    cannot = f"the {kind} in {head_dir} cannot draft for this model:"
    token, where = mx.zeros((1, 1), mx.int32), np.zeros((3, 1, 1), np.int32)
    try:
        read = target.extend(token, None, target.make_cache(), where, launch=False)
        reason = rewind_unsupported_reason(target)
    except KeyError as error:
        raise EngineFailed(
            f"{cannot} the library's module does not call layer {error}, whose output it reads"
        ) from None
    expected = (1, 1, width)
    if read is None or read.shape != expected:
        found = None if read is None else read.shape
        raise EngineFailed(f"{cannot} its layers return {found} for a token, expected {expected}")
    if reason is not None:
        raise EngineFailed(f"{cannot} {reason}")
