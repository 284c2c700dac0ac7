"""The activation of ModernBERT: the exact GELU.

`gelu` in a config.json is x * Phi(x), as transformers computes it (torch.nn.functional.gelu). mlx_vlm 0.7.10 builds
`nn.GELU(approx="precise")`, which MLX computes by a hyperbolic tangent and which differs by up to 5e-4 per number
(mlx_vlm/models/modernbert/modernbert.py). It can be removed when the library builds `nn.GELU()`.
"""

import mlx.nn as nn
from mlx_vlm.models.modernbert.modernbert import ModernBertMLP, ModernBertPredictionHead


def correct(module: nn.Module) -> None:
    """Replace the activations of a ModernBERT, whose config.json has the activation `gelu`."""
    for _, part in module.named_modules():
        if isinstance(part, ModernBertMLP | ModernBertPredictionHead):
            part.act = nn.GELU()
