"""VisionFamily: models whose images are prepared and placed in one way, and which configurations are accepted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.processing.image_placeholder import ImagePlaceholder, SpecialStrings
from engine.protocol import ImagePatches

PROCESSOR_KEYS = ("image_processor_type", "feature_extractor_type", "processor_class")
"""Keys under which a configuration may name the class of the image processor, the first one first."""

AttentionKind = Literal["full", "window"]
"""Attention layers: those that see all tokens before, and those with a sliding window."""

ImagesFirst = Literal["behind bos", "before bos"]
"""Where the images of a prompt stand, see `VisionFamily.images_first`."""

HALF = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
"""Mean and deviation of pixels, as many processors have them."""


@dataclass(frozen=True)
class VisionFamily:
    """Models whose images are preprocessed and placed in the same way."""

    name: str
    """Name of the image grid, see engine/processing/grid_settings.py."""
    model_types: frozenset[str]
    """`model_type` of config.json."""
    processors: frozenset[str]
    """`image_processor_type` of the checkpoint's image processor."""
    placeholder: Callable[[ImagePatches, SpecialStrings], ImagePlaceholder]
    """Returns the placeholder of an image."""
    marker: Callable[[SpecialStrings], str] = lambda strings: strings.image
    """Returns the string that the chat template writes for an image, which the placeholder replaces."""
    marker_is_text: bool = False
    """Whether the marker may be text of the chat template that is no token; no client's text can spell it then."""
    marks: Callable[[SpecialStrings, Mapping[str, Any]], Iterator[str]] | None = None
    """Returns the tokens around image tokens that the tokenizer must have, by the settings of the image processor;
    None: they are not checked."""
    image_token: str | None = None
    """The image token where config.json may lack its id."""
    in_text: Callable[[SpecialStrings], str] | None = None
    """Returns what stands for an image in a message whose template takes only text; None: images need a template that
    takes parts."""
    adds_beginning: bool = False
    """Whether the processor begins each prompt with the tokenizer's bos token, or its eos token if there is none, where
    the chat template does not."""
    images_first: ImagesFirst | None = None
    """Where all images of a prompt stand before its text: behind the token that begins the prompt, and then the text
    begins with a space; or before that token. None: each stands where the message has it."""
    adds_features: bool = False
    """Whether features are added to the embedding of the image token instead of replacing it."""
    heeds_add_bos: bool = False
    """Whether it does so only if the tokenizer does, by `add_bos_token` of tokenizer_config.json."""
    needs_processor: bool = True
    """Whether images need the configuration of an image processor; else config.json has the settings."""
    plain_template: str | None = None
    """The chat template where the checkpoint has none; None: a checkpoint needs one."""
    plain_tokens: str = ""
    """Pattern of added tokens that are words of the model, which a client's text may spell; '' for none."""
    deepstack: frozenset[str] = frozenset()
    """Those of model_types whose language model takes deepstack features."""
    towers: frozenset[str] = frozenset()
    """`model_type` of the vision towers, where models of the same model_type have several kinds."""
    videos: frozenset[str] = frozenset()
    """Those of model_types that read videos as groups of frames with their times."""
    unsupported_settings: tuple[str, ...] = ()
    """Settings of the image processor that must be off."""
    both_ways: Callable[[Mapping[str, Any]], frozenset[AttentionKind]] = lambda config: frozenset()
    """Returns, by config.json, in which layers the tokens of a run see each other; in all others each of them sees
    those before it."""
    whole_prompts: Callable[[Mapping[str, Any]], bool] = lambda config: False
    """Returns, by config.json, whether all tokens of a prompt see each other, those of texts as well."""
    required_keys: tuple[str, ...] = ()
    """Keys of config.json that must not be missing; keys of its parts have dots between them."""
    setting_values: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor that may be missing or null, and the value that they must have otherwise."""
    config_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that may be missing, and the value that they must have otherwise; keys of its parts have dots
    between them."""
    required_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys that config.json must have, and their value."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the image processor's class for keys that its configuration lacks."""

    def settings(self, processor_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return an image processor's configuration, completed by the defaults of its class."""
        return {**self.defaults, **{key: value for key, value in processor_config.items() if value is not None}}

    def begins_prompts(self, tokenizer_config: Mapping[str, Any]) -> bool:
        """Return whether the processor begins each prompt with a token. tokenizer_config: tokenizer_config.json."""
        return self.adds_beginning and not (self.heeds_add_bos and tokenizer_config.get("add_bos_token") is False)

    def unsupported_reason(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> str | None:
        """Return why images of a checkpoint of this family are refused, None if they are accepted.

        Args:
            config: config.json.
            processor: The configuration of its image processor; {} if it has none.
        """
        if not isinstance(vision := config.get("vision_config"), dict):
            return "config.json has no vision_config"
        names = (processor.get(key) for key in PROCESSOR_KEYS)
        name = next((name for name in names if name is not None), None)
        if name not in self.processors and (name is not None or self.needs_processor):
            return f"the image processor is {name}; supported are {', '.join(sorted(self.processors))}"
        if self.image_token is not None and image_token_id(config) is None:
            return f"config.json has no image_token_index, and the tokenizer no token {self.image_token}"
        if (reason := self._wrong_value(config, processor)) is not None:
            return reason
        if self.towers and (tower := vision.get("model_type")) not in self.towers:
            return f"the vision tower is {tower}; supported are {', '.join(sorted(self.towers))}"
        if not isinstance(config.get("vision_feature_layer", 0), int):
            return f"the features are those of several layers, {config['vision_feature_layer']}; one is supported"
        model_type = str(config.get("model_type"))
        if vision.get("deepstack_visual_indexes") and model_type not in self.deepstack:
            return f"the language model of {model_type} takes no deepstack features"
        return None

    def _wrong_value(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> str | None:
        for key in self.unsupported_settings:
            if processor.get(key):
                return f"the image processor has {key}: {processor[key]!r}, which is not supported"
        if missing := [key for key in self.required_keys if value_at(config, key, None) is None]:
            return f"config.json has no {missing[0]}"
        for key, supported in self.setting_values.items():
            if (value := processor.get(key)) is not None and value != supported:
                return f"the image processor has {key}: {value!r}; supported is {supported!r}"
        for key, supported in {**self.config_values, **self.required_values}.items():
            if (value := value_at(config, key, self.config_values.get(key))) != supported:
                return f"config.json has {key}: {value!r}; supported is {supported!r}"
        return None


def in_frames(images: Sequence[ImagePatches], strings: SpecialStrings) -> ImagePlaceholder:
    """Frames of a video, one run per group after its time, as Qwen3-VL has it.

    The runs are of image tokens: positions and features are those of video tokens, which they replace.
    """
    begin, end = _qwen_around(strings)
    times_s = [image.frame.time_s for image in images if image.frame is not None]
    text = "".join(f"<{time_s:.1f} seconds>{begin}{strings.image}{end}" for time_s in times_s)
    return ImagePlaceholder(text, tuple(image.num_tokens for image in images))


def video_marker(strings: SpecialStrings) -> str:
    """Return the string that the chat template of a family with videos writes for a video."""
    begin, end = _qwen_around(strings)
    return f"{begin}{strings.named('video_token_id', '<|video_pad|>')}{end}"


def _qwen_around(strings: SpecialStrings) -> tuple[str, str]:
    begin = strings.named("vision_start_token_id", "<|vision_start|>")
    return begin, strings.named("vision_end_token_id", "<|vision_end|>")


def value_at(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value under keys with dots between them, the default if one is missing."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def image_token_id(config: Mapping[str, Any]) -> int | None:
    """Return the id of the image token, None for a text model."""
    token_id = config.get("image_token_id")
    return config.get("image_token_index") if token_id is None else token_id


def processors_named(*stems: str) -> frozenset[str]:
    """Return the class names of image processors, with those of their backends."""
    return frozenset(f"{stem}ImageProcessor{backend}" for stem in stems for backend in ("", "Fast", "Pil"))
