"""The layers and the GELU of Molmo2's vision tower.

The features are hidden states of the layers -3 and -9 of the 27 that config.json declares, of which a checkpoint has
the 25 that are needed. mlx_vlm 0.7.10 builds 25 and counts from there: it takes the layers 22 and 16 instead of 24 and
18. Its `gelu_pytorch_tanh` is x * sigmoid(1.702 * x). Transformers and vLLM compute both as here. The patch can be
removed when the library does so.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import BaseModelConfig
from mlx_vlm.models.molmo2.config import AdapterConfig, VisionConfig, VitConfig
from mlx_vlm.models.molmo2.vision import ViTMLP

NUM_LAYERS = 27
"""Layers of a tower whose configuration does not tell."""

library_from_dict: Any = vars(VisionConfig)["from_dict"]
library_call = ViTMLP.__call__


def _from_dict(cls: Any, params: dict[str, Any]) -> Any:
    """Read the configuration with the layers counted from the first, and with as many as are needed."""
    adapter = AdapterConfig.from_dict(params.get("adapter_config") or {})
    vit = dict(params.get("vit_config") or {})
    declared = vit.get("num_hidden_layers", NUM_LAYERS)
    if wrong := [layer for layer in adapter.vit_layers if not -declared <= layer < declared]:
        raise ValueError(f"vit_layers has {wrong[0]}; it must be between {-declared} and {declared - 1}")
    adapter.vit_layers = [layer if layer >= 0 else layer + declared for layer in adapter.vit_layers]
    vit["num_hidden_layers"] = min(declared, max(adapter.vit_layers) + 1)
    read = BaseModelConfig.from_dict.__func__(VitConfig, vit)  # type: ignore[attr-defined]  # past the library's 25
    return cls(vit_config=read, adapter_config=adapter)


def _call(self: Any, x: mx.array) -> mx.array:
    return self.w2(nn.gelu_approx(self.w1(x)))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    config: Any = VisionConfig
    config.from_dict = classmethod(_from_dict)
    ViTMLP.__call__ = _call
