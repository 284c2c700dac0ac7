"""CrossEncoder: a reranker that is an encoder, which reads query and document at once and has an output layer."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_optional_json
from engine.processing.encoders import has_classes, is_encoder
from engine.processing.reranker import Reranker
from engine.processing.sentence_transformers import is_cross_encoder, kind_of, read_max_tokens, read_modules


@dataclass(frozen=True)
class CrossEncoder:
    """An encoder with an output layer of one class, such as bge-reranker. Its score is the logit of that class."""

    max_tokens: int | None = None
    """Most tokens of a pair, with those that the tokenizer adds; None: the context of the model."""

    @classmethod
    def read(cls, model_dir: Path) -> "CrossEncoder | None":
        """Read a checkpoint's files; return None for one that is no encoder, or has no output layer for classes.

        Raises:
            EngineFailed: It is a cross-encoder that cannot be served, or a file has other contents than expected.
        """
        config = read_optional_json(model_dir / "config.json")
        if not is_encoder(config):
            return None
        kinds = [kind_of(module) for module in read_modules(model_dir)]
        if not has_classes(config):
            if is_cross_encoder(model_dir):
                raise EngineFailed(
                    f"{model_dir}: this cross-encoder has no architecture with an output layer for classes in "
                    "config.json, from which its scores would come"
                )
            return None
        if not set(kinds) <= {"Transformer"}:
            raise EngineFailed(
                f"{model_dir}: encoders with an output layer for classes and the modules {', '.join(kinds)} cannot be "
                "served; those with Transformer alone, or without modules.json, can"
            )
        return cls(read_max_tokens(model_dir))


def read_reranker(model_dir: Path) -> Reranker | CrossEncoder | None:
    """Return how a checkpoint scores pairs of texts, None if it is no reranker. Raises EngineFailed."""
    return CrossEncoder.read(model_dir) or Reranker.read(model_dir)
