"""Locates a model's files and reads its configuration, without running code from the checkpoint."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors  # which the package would load only at a use by name

from engine.demo import DEMO_MODEL
from engine.errors import EngineFailed
from engine.processing.image_placeholder import SpecialStrings
from engine.processing.reference_config import text_section
from engine.processing.vision_families import vision_family
from engine.processing.vision_family import VisionFamily, image_token_id
from engine.smollm2 import SMOLLM2, is_made, smollm2_checkpoint, smollm2_directory

VIDEO_PROCESSOR = "Qwen3VLVideoProcessor"
"""Class name of the only supported video processor."""

CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors",)

CODE_KEYS = ("model_file", "auto_map")
"""Keys with which a checkpoint names its own Python code, which loading libraries would run (CVE-2026-5843)."""

HEAD_SUFFIXES = ("-mtp", "-assistant")
"""Suffixes of the name of a checkpoint's directory, of the directory beside it with its MTP head."""


def resolve_checkpoint(model: str, revision: str | None, *, weights: bool) -> Path:
    """Return the directory with a model's files, downloading a hub repository if needed.

    Args:
        model: 'demo', 'smollm2', a directory or a hub repository.
        revision: Branch, tag or commit of a hub repository.
        weights: Whether to download the weights too, and not only configuration, template and tokenizer files.

    Raises:
        EngineFailed: The model cannot be found or downloaded.
    """
    local = smollm2_checkpoint() if model == SMOLLM2 else _local_directory(model)
    if local is None:
        return _download(model, revision, CONFIG_PATTERNS + WEIGHT_PATTERNS if weights else CONFIG_PATTERNS)
    if revision is not None:
        raise EngineFailed(f"revision {revision!r} has no effect: model {model!r} is the directory {local}")
    return local


def checkpoint_here(model: str, revision: str | None) -> Path | None:
    """Return the directory of a model whose weights are on this machine, None if they are not. Downloads nothing.

    Args:
        model: As for resolve_checkpoint.
        revision: As for resolve_checkpoint.
    """
    if model == SMOLLM2:
        return smollm2_directory() if is_made() else None
    try:
        if (local := _local_directory(model)) is not None:
            return local
        patterns: list[str] = [*CONFIG_PATTERNS, *WEIGHT_PATTERNS]
        return Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=True)
        )
    except (EngineFailed, huggingface_hub.errors.HFValidationError, OSError):
        return None


def is_local(model: str) -> bool:
    """Return whether a model is no hub repository. Raises EngineFailed if it is nothing known either."""
    return model == SMOLLM2 or _local_directory(model) is not None


def heads_beside(model_dir: Path) -> list[Path]:
    """Return the directories beside a checkpoint's in which its MTP head is looked for, as far as there are any."""
    named = (model_dir.parent / f"{model_dir.name}{suffix}" for suffix in HEAD_SUFFIXES)
    return [path for path in named if path.is_dir()]


def draft_of(draft_model: str | None) -> str:
    """Return the argument of `resolve_checkpoint` for a draft model; 'demo' or None is the demo model's draft."""
    return str(DEMO_MODEL / "draft") if draft_model in (None, "demo") else draft_model


def _local_directory(model: str) -> Path | None:
    if model == "demo":
        return DEMO_MODEL
    if not model.strip():
        raise EngineFailed(f"model is {model!r}; expected 'demo', 'smollm2', a directory or a hub repository")
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise EngineFailed(f"model {model!r} is a file; expected the directory that contains config.json")
    if model[0] in "./~" or "\\" in model or model.count("/") > 1:
        raise EngineFailed(
            f"model {model!r}: there is no directory {path.absolute()}, and this is not the name of a hub repository"
        )
    return None


def _download(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except huggingface_hub.errors.HFValidationError as error:
        reason = f"it is neither a directory nor the name of a hub repository ({error})"
    except Exception as error:  # whatever the hub's client raises: offline, gated, no such revision, no disk
        reason = f"no such directory, and the download from the hub failed ({error})"
    at = f" at revision {revision!r}" if revision is not None else ""
    raise EngineFailed(f"model {repository!r}{at}: {reason}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. Raises EngineFailed naming file and reason."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineFailed(f"{path}: the file is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFailed(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise EngineFailed(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint, completed under the names that other repositories use.

    InternVL's own repositories have an `llm_config`, and their image token is known by its name alone. Molmo2's have
    an `image_patch_id`, and the two parts of the vision tower at the top, where the library looks for them too.
    Phi-3-vision's have an `img_processor`, and fixed sizes of the tower. Molmo's have neither part of their own.

    Raises:
        EngineFailed: The file is missing or broken.
    """
    config = read_json(model_dir / "config.json")
    if "llm_config" in config and "text_config" not in config:
        config["text_config"] = config.pop("llm_config")
    if _is_molmo2(config):
        config["image_token_id"] = config.get("image_patch_id")
        if "vit_config" in config and not config.get("vision_config"):
            config["vision_config"] = {key: config.get(key, {}) for key in ("vit_config", "adapter_config")}
    if config.get("model_type") == "phi3_v" and config.get("img_processor") and not config.get("vision_config"):
        config["vision_config"] = config["img_processor"]
    if config.get("model_type") == "molmo":
        config.setdefault("vision_config", {})
    family = vision_family(config)
    if family is not None and family.image_token is not None and image_token_id(config) is None:
        token_id = _added_tokens(model_dir).get(family.image_token)
        if token_id is not None:
            config["image_token_index"] = token_id
    return config


def _added_tokens(model_dir: Path) -> dict[str, int]:
    """Return the ids of the added tokens of a checkpoint's tokenizer by their content."""
    added = read_optional_json(model_dir / "tokenizer.json").get("added_tokens") or []
    named = read_optional_json(model_dir / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {str(token.get("content")): int(id_) for id_, token in named.items()}
    return {**found, **{str(token.get("content")): int(token["id"]) for token in added}}


def refuse_code(model_dir: Path, known: Mapping[str, Any] | None = None) -> None:
    """Raise EngineFailed if a configuration file names code that the loading libraries would run.

    Args:
        model_dir: A checkpoint.
        known: Values of such keys that are accepted, because no loading library sees them and what they name is
            computed without that code.
    """
    accepted = known or {}
    for path in sorted(model_dir.glob("*config*.json")):
        named = [(key, value) for key, value in _items(read_json(path)) if key in CODE_KEYS]
        found = next((key for key, value in named if key not in accepted or accepted[key] != value), None)
        if found is not None:
            raise EngineFailed(
                f"{path}: {found!r} names Python code inside the checkpoint. Orchard runs no code from checkpoints; "
                f"use a model that the installed libraries support, or remove the key if they support this one."
            )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item.items()
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def vocab_size(config: dict[str, Any]) -> int:
    """Return the number of logits; every token id of an answer is below it. Raises EngineFailed."""
    for section in (config.get("text_config"), config):
        size = section.get("vocab_size") if isinstance(section, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    raise EngineFailed("config.json: vocab_size is missing or not a positive integer")


def num_embeddings(config: dict[str, Any]) -> int:
    """Return the number of rows of the embedding; every token id of a prompt is below it. Raises EngineFailed.

    Molmo and Molmo2 have further embeddings, of tokens around images, which the output layer lacks.
    """
    size = vocab_size(config)
    if config.get("model_type") not in ("molmo", "molmo2"):
        return size
    if not _is_molmo2(config):
        size = text_section(config).get("embedding_size") or size
    more = text_section(config).get("additional_vocab_size", 128)
    if type(more) is not int or more < 0:
        raise EngineFailed(f"config.json: additional_vocab_size is {more!r}; it must be an integer of at least 0")
    return size + more


def _is_molmo2(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "molmo2"


def media_kinds(model_dir: Path, config: dict[str, Any]) -> frozenset[str]:
    """Return the kinds of media that the model reads and that planner and engine support: image, video, or nothing.

    Ingress, planner and engine all call this, so that they agree on what is accepted.
    """
    if images_unsupported_reason(model_dir, config) is not None:
        return frozenset()
    return frozenset({"image"} if videos_unsupported_reason(model_dir, config) is not None else {"image", "video"})


def videos_unsupported_reason(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Return why a model whose images are accepted accepts no videos, None if it does."""
    family = vision_family(config)
    if family is None or config.get("model_type") not in family.videos:
        return f"videos of the family {config.get('model_type')} are not supported"
    video, image = video_processor_config(model_dir), image_processor_config(model_dir)
    if (processor := video.get("video_processor_type")) != VIDEO_PROCESSOR:
        return f"the video processor is {processor}; supported is {VIDEO_PROCESSOR}"
    for key in ("image_mean", "image_std"):
        if video.get(key, image.get(key)) != image.get(key):
            return f"{key} of videos is {video[key]}, that of images {image.get(key)}; supported is the same for both"
    if importlib.util.find_spec("av") is None:
        return "the package av is not installed; the extra `video` brings it"
    return None


def video_processor_config(model_dir: Path) -> dict[str, Any]:
    """Return the video processor's configuration from either of the two files that may have it; {} without one."""
    own_file = read_optional_json(model_dir / "video_preprocessor_config.json")
    return own_file or read_optional_json(model_dir / "processor_config.json").get("video_processor") or {}


def images_unsupported_reason(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Return why the model accepts no images, None if it does."""
    family = vision_family(config)
    if family is not None:
        processor = image_processor_config(model_dir)
        return family.unsupported_reason(config, processor) or _missing_mark(model_dir, family, processor)
    if not isinstance(config.get("vision_config"), dict):
        return "it is a text model"
    return f"images of the family {config.get('model_type')} are not supported"


def _missing_mark(model_dir: Path, family: VisionFamily, processor: dict[str, Any]) -> str | None:
    """Return a reason that names a token around images which the tokenizer lacks, None if it lacks none."""
    if family.marks is None:
        return None
    files = ("tokenizer_config.json", "processor_config.json")
    more, added = [read_optional_json(model_dir / name) for name in files], _added_tokens(model_dir)
    marks = family.marks(SpecialStrings("", {**more[0], **more[1]}), family.settings(processor))
    try:
        missing = next((mark for mark in marks if mark not in added), None)
    except (TypeError, ValueError) as error:
        return f"the settings of the image processor cannot be read ({error})"
    return None if missing is None else f"the tokenizer has no token {missing}"


def image_processor_config(model_dir: Path) -> dict[str, Any]:
    """Return the image processor's configuration from either of the two files that may have it; {} if there is none.

    DeepSeek-OCR has no image processor of its own: processor_config.json has its settings among those of the processor.
    Kimi K2.5 has its settings in a part of the file.
    """
    if own_file := read_optional_json(model_dir / "preprocessor_config.json"):
        return {**own_file, **(own_file.get("media_proc_cfg") or {})}
    whole = read_optional_json(model_dir / "processor_config.json")
    return whole.get("image_processor") or (whole if "image_mean" in whole else {})
