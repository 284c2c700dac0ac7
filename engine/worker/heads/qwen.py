"""The head of Qwen3.5 and Qwen3-Next, `mtp.*`: a projection of both inputs, decoder layers and a norm."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter
from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig, Qwen3_5MTPDraftModel
from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter, Qwen3NextMTPSplitter
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.reference_config import arithmetic_reference, text_section
from engine.worker.config_fields import check_arithmetic
from engine.worker.heads.head import Head, SharesTarget
from engine.worker.heads.head_files import check_fit, has_tensors, read_head

SPLIT_TYPE = Qwen3_5MTPSplitter.output_model_type

MAX_SHARE_NOT_POSITIVE = 0.25
"""Limit per norm. Trained gains are positive in each of the demo's 28 norms. If unshifted (raw files hold gain - 1),
at least pre_fc_norm_embedding is negative: 88 % of the demo's, all of published ones (MTPLX#511)."""
MAX_SHARE_ABOVE_ONE = 0.99
"""Limit over all gains of a head: 53 % in the demo's, 100 % when shifted twice. Means are no criterion: published heads
range from 0.27 (pre_fc_norm_embedding, omlx#3750) to 2.25 (norm, MTPLX#301), the demo's from 0.50 to 1.54."""


class QwenHead(SharesTarget, Qwen3_5MTPDraftModel):
    """Implements Head."""

    as_offset = False
    model_path: Path

    @property
    def hidden_size(self) -> int:
        return self.fc.weight.shape[0]

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(pair, axis=-1))
        mask: Any = create_attention_mask(x, cache[0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, mask=mask, cache=layer_cache, position_ids=positions)
        return self.norm(x)


@dataclass(frozen=True)
class QwenFormat:
    """Implements HeadFormat."""

    splitter: type[MTPSplitter]
    """How the library reads the head from a checkpoint of the family."""
    split_types = (SPLIT_TYPE,)
    tensors = "mtp.*"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return has_tensors(model_dir, self.splitter)

    def load(self, head_dir: Path, language_model: Any) -> Head:
        splitters = {family: one.splitter for family, one in QWEN_FORMATS.items()}
        config, weights = read_head(head_dir, self.split_types, splitters)  # norms as gains, as in a split head
        head_config = ModelConfig.from_dict(copy.deepcopy(config))  # from_dict edits its argument
        check_fit(identity(head_config.text_config), identity(language_model.args), head_dir)
        section = text_section(config)
        try:
            reference = arithmetic_reference(config)
            check_arithmetic(str(section.get("model_type")), section, head_config.text_config, reference)
        except EngineFailed as error:
            raise EngineFailed(f"the MTP head in {head_dir} cannot be used: {error}") from None
        # Not mlx_vlm's load_model: it drops modules without tensors instead of refusing (0.7.10, utils.py).
        head: Any = load_model_weights(QwenHead(head_config), config, weights, head_dir, lazy=True)
        return head

    def check_values(self, head: Head) -> None:
        """Check the norms: with wrong ones a head loads and drafts, but almost nothing is accepted.

        Raises:
            EngineFailed: Norms were not shifted by one, or twice.
        """
        weights: Any = tree_flatten(head.parameters())  # type: ignore[attr-defined]
        _check_norms({name: w for name, w in weights if name.endswith("norm.weight")}, head.model_path)


QWEN_FORMATS: dict[str, QwenFormat] = {
    "qwen3_5": QwenFormat(Qwen3_5MTPSplitter),
    "qwen3_5_text": QwenFormat(Qwen3_5MTPSplitter),
    "qwen3_5_moe": QwenFormat(Qwen3_5MTPSplitter),
    "qwen3_5_moe_text": QwenFormat(Qwen3_5MTPSplitter),
    "qwen3_next": QwenFormat(Qwen3NextMTPSplitter),
}
"""By the model_type of a checkpoint."""


def identity(text_config: Any) -> dict[str, Any]:
    """Return what a head and its model must have in common to share hidden states, embeddings and positions.

    Qwen3-Next has its rope settings beside each other, and no sections, as it takes one position per token.
    """
    nested = getattr(text_config, "rope_parameters", None)
    rope = vars(text_config) if nested is None else nested
    keys = ("rope_theta", "partial_rotary_factor", "mrope_section")
    return {
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        **{key: rope[key] for key in keys if key in rope},
    }


def _check_norms(gains: dict[str, mx.array], head_dir: Path) -> None:
    for name, g in gains.items():
        share = _count(g <= 0) / g.size
        if share > MAX_SHARE_NOT_POSITIVE:
            raise EngineFailed(
                f"the MTP head in {head_dir}: {share:.0%} of {name} are not positive, expected at most "
                f"{MAX_SHARE_NOT_POSITIVE:.0%}: its norms contain gain - 1, but its files or names indicate the gain"
            )
    share = sum(_count(g > 1) for g in gains.values()) / sum(g.size for g in gains.values())
    if share > MAX_SHARE_ABOVE_ONE:
        raise EngineFailed(
            f"the MTP head in {head_dir}: {share:.0%} of the gains in its norms are above 1, expected at most "
            f"{MAX_SHARE_ABOVE_ONE:.0%}: its norms contain the gain, but its files or names indicate gain - 1"
        )


def _count(condition: mx.array) -> int:
    count: Any = condition.sum().item()
    return count
