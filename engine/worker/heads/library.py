"""Checkpoints of heads that are computed by the library's module, with the names that its splitter gives the tensors.

Conversions for MLX leave such a head out, so that `mtp_head` names the original checkpoint, or the output of
mlx_vlm.split_mtp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.worker.config_fields import ARITHMETIC
from engine.worker.heads.head import Head
from engine.worker.heads.head_files import check_fit, has_tensors, read_head
from engine.worker.language_model import config_of

SAME = ("hidden_size", "vocab_size", "num_hidden_layers", "hc_mult", "sliding_window", "rope_theta", "index_topk")
"""Fields that head and target must have in common, beside those of ARITHMETIC; others change the shape of a weight."""


@dataclass(frozen=True)
class LibraryFormat:
    """Implements HeadFormat."""

    family: str
    """model_type of checkpoints."""
    splitter: type[MTPSplitter]
    """How the library reads the head from a checkpoint."""
    new_head: Callable[[Any], Any]
    """Returns a head without weights for the library's language model of the target."""
    tensors: str
    """See HeadFormat."""
    shared: tuple[str, ...]
    """Beginnings of the names of tensors that the target has too, and that some checkpoints repeat."""
    known_code = None

    @property
    def split_types(self) -> tuple[str, ...]:
        return (self.splitter.output_model_type,)

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, self.splitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        if read_config(head_dir).get("model_type") == self.family and not self.is_in(head_dir):
            raise EngineFailed(f"no {self.tensors} tensors in {head_dir}")
        config, weights = read_head(head_dir, self.split_types, {self.family: self.splitter})
        target = config_of(language_model)
        text_config = config["text_config"]
        names = [name for name in (*SAME, *ARITHMETIC) if name in text_config and hasattr(target, name)]
        check_fit(text_config, {name: getattr(target, name) for name in names}, head_dir)
        own = {name: tensor for name, tensor in weights.items() if not name.startswith(self.shared)}
        head: Any = load_model_weights(self.new_head(language_model), config, own, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""
