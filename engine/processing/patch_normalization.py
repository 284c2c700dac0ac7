"""PatchNormalization: the normalisation of pixels for the vision tower, read from the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import EngineFailed

Array = TypeVar("Array", bound=Any)

DEFAULT_MEAN = (0.48145466, 0.4578275, 0.40821073)
DEFAULT_STD = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's values, which the Qwen2-VL image processor uses by default."""


@dataclass(frozen=True)
class PatchNormalization:
    """uint8 patches become (patch * rescale - mean) / std per channel."""

    mean: tuple[float, ...]
    """One value per channel."""
    std: tuple[float, ...]
    """One value per channel."""
    rescale: float
    """Factor on the uint8 values; 1 / 255 unless the checkpoint says otherwise."""
    temporal_patch_size: int
    """Repetitions of a still image's patch along time."""
    divisor: float | None = None
    """Divisor of the uint8 values instead of the factor, of a processor that divides: the results round otherwise."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "PatchNormalization":
        """Read the settings from the configuration of an image processor. Raises EngineFailed.

        The defaults, for keys that the model's family has none for, are those of transformers'
        Qwen2VLImageProcessorPil, which is not imported because that takes a second.
        """

        def given(key: str, default: Any) -> Any:
            value = config.get(key)
            return default if value is None else value

        normalizes, rescales = given("do_normalize", True), given("do_rescale", True)
        try:
            return cls(
                mean=_per_channel(given("image_mean", DEFAULT_MEAN) if normalizes else 0.0),
                std=_per_channel(given("image_std", DEFAULT_STD) if normalizes else 1.0),
                rescale=float(given("rescale_factor", 1 / 255)) if rescales else 1.0,
                temporal_patch_size=int(given("temporal_patch_size", 2)),
                divisor=config.get("rescale_divisor"),
            )
        except (TypeError, ValueError) as error:
            raise EngineFailed(f"the checkpoint's image processor has a value that is not a number ({error})") from None

    def rescaled(self, values: Array) -> Array:
        """Return values between 0 and 255, float32 of NumPy or MLX, as the processor scales them."""
        return values * self.rescale if self.divisor is None else values / self.divisor


def _per_channel(value: float | list[float] | tuple[float, ...]) -> tuple[float, ...]:
    return (float(value),) * 3 if isinstance(value, int | float) else tuple(float(v) for v in value)
