"""Position embeddings of Phi-4-reasoning-vision's tower for images of any shape, as its authors interpolate them.

SigLIP 2 reduces and enlarges its square of positions linearly, with antialiasing (`Siglip2VisionEmbeddings` of
transformers). mlx_vlm 0.7.10 does so for LFM2-VL, but takes cubic interpolation for Phi-4, which shifts each embedding
by several percent. It can be removed when the library takes the same function for both.
"""

from typing import Any

from mlx_vlm.models.lfm2_vl.vision import VisionEmbeddings as Lfm2Embeddings
from mlx_vlm.models.phi4_siglip.vision import VisionEmbeddings

library_resize: Any = VisionEmbeddings.resize_positional_embeddings


def install() -> None:
    """Replace the library's function. May be called several times."""
    embeddings: Any = VisionEmbeddings
    embeddings.resize_positional_embeddings = staticmethod(Lfm2Embeddings.resize_positional_embeddings)
