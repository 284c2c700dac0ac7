"""The index of HY V4, which chooses other tokens than the best once prompts of other lengths have been computed.

mlx_vlm 0.7.10 compiles the choice once for arrays of any shape. With MLX 0.32.4 it is right for the first length alone;
for others it gives other tokens, or the process ends with a segmentation fault. The same index without compilation is
that of DeepSeek V3.2. It can be removed when the library no longer compiles the choice so.
"""

from mlx_vlm.models.deepseek_v32.language import Indexer
from mlx_vlm.models.hy_v4.indexer import HyV4Indexer


def install() -> None:
    """Replace the library's method. May be called several times."""
    HyV4Indexer.__call__ = Indexer.__call__
