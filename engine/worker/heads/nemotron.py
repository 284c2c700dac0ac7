"""The head of Nemotron-H, `mtp.*`: a projection of both inputs, then layers of attention and of experts, and a norm."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters.nemotron_h_mtp import NemotronHMTPDraftModel
from mlx_vlm.speculative.drafters.nemotron_h_mtp.config import NemotronHMTPConfig
from mlx_vlm.speculative.drafters.nemotron_h_mtp.split import NemotronHMTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.reference_config import arithmetic_reference, text_section
from engine.worker.config_fields import check_arithmetic
from engine.worker.heads.head import Head, SharesTarget
from engine.worker.heads.head_files import check_fit, has_tensors, read_head


class NemotronHead(SharesTarget, NemotronHMTPDraftModel):
    """Implements Head. Its attention has no positions."""

    as_offset = True
    model_path: Path

    @property
    def hidden_size(self) -> int:
        return self.config.text_config.hidden_size

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        return self._forward_hidden(embeds, hidden, None, cache)[0]


class NemotronFormat:
    """Implements HeadFormat."""

    split_types = (NemotronHMTPSplitter.output_model_type,)
    tensors = "mtp.*"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, NemotronHMTPSplitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config, weights = read_head(head_dir, self.split_types, dict.fromkeys(NEMOTRON_FORMATS, NemotronHMTPSplitter))
        head_config = NemotronHMTPConfig.from_dict(copy.deepcopy(config))
        text_config: Any = head_config.text_config
        pattern = "".join(head_config.layer_pattern)
        if "*" not in pattern:
            raise EngineFailed(f"the MTP head in {head_dir}: its layers are {pattern!r}, expected a '*' for attention")
        target = language_model.args
        known = {name: getattr(target, name) for name in ("hidden_size", "vocab_size", "layer_norm_epsilon")}
        check_fit(vars(text_config), known, head_dir)
        section = text_section(config)
        try:
            check_arithmetic(str(section.get("model_type")), section, text_config, arithmetic_reference(config))
        except EngineFailed as error:
            raise EngineFailed(f"the MTP head in {head_dir} cannot be used: {error}") from None
        head: Any = load_model_weights(NemotronHead(head_config), config, weights, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Do nothing: its norms are stored as they are."""


NEMOTRON_FORMATS: dict[str, NemotronFormat] = {
    family: NemotronFormat() for family in ("nemotron_h", "nemotron_h_nano_omni")
}
"""By the model_type of a checkpoint."""
