"""MTP: drafts with a head that reads the target's hidden states; see heads/head.py for the forms of heads."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.worker import head_loader
from engine.worker.drafter import DraftingModel
from engine.worker.drafting_head import DraftingHead
from engine.worker.layer_outputs import ModuleOutputs
from engine.worker.loaded_model import FoundProposer, OpenedModel
from engine.worker.proposer import ModelProposer, Target
from engine.worker.weights import DTYPES, cast, choose_dtype, expand_weights, is_quantized

log = logging.getLogger("orchard.engine")

LENGTHS = (1, 2, 3)
"""Draft tokens per row that `auto` chooses from. Heads are trained for one to two tokens ahead; a fourth is rarely
right."""
SHARING_LENGTHS = (1, 3, 5, 7)
"""The same for a head that shares the target's keys and values: it is trained to draft several tokens from one place.
For Gemma 4 two to four are recommended with its small models, four to eight with the others."""
BLOCK_LENGTHS = (1, 3, 7, 15)
"""The same for a head that drafts a block in one forward, as far as they are below the longest block."""
MOST_STATES = 3
"""The most of these for recurrent models that keep a state per verified token."""


class MTP(ModelProposer):
    """Implements Proposer. Each head is a proposer of its own."""

    name = "mtp"
    label = "MTP head"
    needs_rewind = False  # a family has a head or not, and other heads check the target themselves
    reads_target = True

    def asked_for(self, config: EngineConfig) -> tuple[str, ...]:
        given = {"mtp": config.mtp not in ("auto", "off"), "mtp_head": config.mtp_head is not None}
        return tuple(name for name, is_given in given.items() if is_given)

    def unsupported_reason(self, family: str, no_rewind: str | None) -> str | None:
        return head_loader.family_unsupported_reason(family)

    def find_all(self, config: EngineConfig, model_dir: Path, model_config: dict[str, Any]) -> dict[str, FoundProposer]:
        """Find each head; the first has the kind's own name, whatever its form, the others are named by their form."""
        found = dict[str, FoundProposer]()
        for head in head_loader.find_heads(config, model_dir, model_config):
            same = sum(name.split("-")[0] == head.form for name in found)
            name = self.name if not found else f"{head.form}-{same + 1}" if same else head.form
            found[name] = FoundProposer(head.status, head.path, text=head.text)
        return found

    def load(
        self,
        config: EngineConfig,
        found: FoundProposer,
        target: OpenedModel,
        opening: Callable[[EngineConfig], OpenedModel],
    ) -> FoundProposer:
        """Load the head in the dtype that the target computes in; a quantized one by the rule for quantized models."""
        assert found.path is not None
        head: Any = head_loader.load_head(found.path, target.config, target.module.language_model)
        head_loader.check_limits(head, config.mtp)
        quantized = is_quantized(head)
        cast(head, choose_dtype(config.dtype, {"quantization": {}}) if quantized else DTYPES[target.dtype])
        if quantized:
            log.info("quantized weights of the MTP head: %s", expand_weights(config, head, target.dtype).text)
        return replace(found, module=head)

    def check(self, module: Any, model_config: dict[str, Any]) -> None:
        head_loader.check_values(module, model_config)

    def layer_outputs(self, module: Any) -> ModuleOutputs | None:
        return module.layer_outputs

    def drafting_model(self, module: Any, target: Target) -> DraftingModel:
        return DraftingHead(module, target.language_model)

    def lengths(self, model: DraftingModel, target: Target) -> Sequence[int]:
        if model.sharing is not None:
            return SHARING_LENGTHS
        if model.block is None:
            return LENGTHS
        most = min(model.block.size - 1, MOST_STATES if target.keeps_states else BLOCK_LENGTHS[-1])
        return [*(k for k in BLOCK_LENGTHS if k < most), most]
