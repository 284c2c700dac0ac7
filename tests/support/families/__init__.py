"""The zoo's table: one tiny configuration per model family that the libraries load.

Recurrent states have dimensions of at least 32: Metal's kernels divide them among the 32 threads of a simdgroup, and
give other tokens with fewer. Real models have 64 or more.
"""

from tests.support.families.dense import DENSE
from tests.support.families.experts import EXPERT_FAMILIES
from tests.support.families.family import Family
from tests.support.families.indexed import INDEXED_FAMILIES
from tests.support.families.mlx_lm_alone import MLX_LM_FAMILIES
from tests.support.families.quantized import QUANTIZED
from tests.support.families.recurrent import RECURRENT_FAMILIES
from tests.support.families.vision import VISION_FAMILIES
from tests.support.families.windows import WINDOW_FAMILIES

FAMILIES: dict[str, Family] = {
    **DENSE,
    **EXPERT_FAMILIES,
    **WINDOW_FAMILIES,
    **RECURRENT_FAMILIES,
    **INDEXED_FAMILIES,
    **MLX_LM_FAMILIES,
    **VISION_FAMILIES,
    **QUANTIZED,
}
