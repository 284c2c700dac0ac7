"""The cast of GLM-5's weights.

mlx_vlm 0.7.10 calls a property of DeepSeek V3.2's model as a function to tell which of its weights may be cast, so that
models of the family `glm_moe_dsa` end with "TypeError: 'property' object is not callable". It can be removed when the
library reads the property, as models/deepseek_v32 does.
"""

from typing import Any

from mlx_vlm.models.deepseek_v32.language import LanguageModel as DeepseekV32
from mlx_vlm.models.glm_moe_dsa.language import LanguageModel

library_predicate: Any = vars(LanguageModel)["cast_predicate"]


def install() -> None:
    """Replace the library's property. May be called several times."""
    model: Any = LanguageModel
    model.cast_predicate = vars(DeepseekV32)["cast_predicate"]
