"""Locates a model's files and reads its configuration, without running code from the checkpoint."""

import importlib.util
import json
import math
import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors  # which the package would load only at a use by name

from engine.demo import DEMO_MODEL
from engine.errors import EngineFailed
from engine.processing.reference_config import text_section
from engine.processing.vision_family import image_token_id, vision_family
from engine.smollm2 import SMOLLM2, is_made, smollm2_checkpoint, smollm2_directory

VIDEO_PROCESSOR = "Qwen3VLVideoProcessor"
"""Class name of the only supported video processor."""

CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors",)

CODE_KEYS = ("model_file", "auto_map")
"""Keys with which a checkpoint names its own Python code, which loading libraries would run (CVE-2026-5843)."""


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
    family = vision_family(config)
    if family is not None and family.image_token is not None and image_token_id(config) is None:
        token_id = _added_token_id(model_dir, family.image_token)
        if token_id is not None:
            config["image_token_index"] = token_id
    return config


def _added_token_id(model_dir: Path, content: str) -> int | None:
    """Return the id of an added token of a checkpoint's tokenizer, None if it has none of this content."""
    added = read_optional_json(model_dir / "tokenizer.json").get("added_tokens") or []
    named = read_optional_json(model_dir / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = [int(token["id"]) for token in added if token.get("content") == content]
    found += [int(id_) for id_, token in named.items() if token.get("content") == content]
    return next(iter(found), None)


def refuse_code(model_dir: Path) -> None:
    """Raise EngineFailed if a configuration file names code that the loading libraries would run."""
    for path in sorted(model_dir.glob("*config*.json")):
        found = next((key for key in _keys(read_json(path)) if key in CODE_KEYS), None)
        if found is not None:
            raise EngineFailed(
                f"{path}: {found!r} names Python code inside the checkpoint. Orchard runs no code from checkpoints; "
                f"use a model that the installed libraries support, or remove the key if they support this one."
            )


def _keys(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item
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

    Molmo2 has further embeddings, of tokens around images, which its output layer lacks.
    """
    size = vocab_size(config)
    return size + int(text_section(config).get("additional_vocab_size", 128)) if _is_molmo2(config) else size


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
        return family.unsupported_reason(config, image_processor_config(model_dir))
    if not isinstance(config.get("vision_config"), dict):
        return "it is a text model"
    return f"images of the family {config.get('model_type')} are not supported"


def image_processor_config(model_dir: Path) -> dict[str, Any]:
    """Return the image processor's configuration from either of the two files that may have it; {} if there is none.

    DeepSeek-OCR has no image processor of its own: processor_config.json has its settings among those of the processor.
    """
    if own_file := read_optional_json(model_dir / "preprocessor_config.json"):
        return own_file
    whole = read_optional_json(model_dir / "processor_config.json")
    return whole.get("image_processor") or (whole if "image_mean" in whole else {})


def check_weights(model_dir: Path) -> None:
    """Check within milliseconds that the weights of a local checkpoint are readable.

    Each safetensors file must have a valid header and the announced number of bytes, and the files that an index names
    must exist.

    Raises:
        EngineFailed: Names the file.
    """
    paths = sorted(model_dir.glob("*.safetensors"))
    for index in sorted(model_dir.glob("*.safetensors.index.json")):
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict):
            raise EngineFailed(f"{index}: expected an object `weight_map`")
        if missing := sorted({str(name) for name in named.values()} - {path.name for path in paths}):
            raise EngineFailed(f"{index} names {len(missing)} files that are missing, such as {missing[0]}")
    if not paths:
        raise EngineFailed(f"{model_dir}: there are no weights (*.safetensors)")
    for path in paths:
        _check_safetensors(path)


def has_output_layer(model_dir: Path) -> bool:
    """Return whether the weights of a local checkpoint have a tensor of the output layer, by the files' headers."""
    return any("lm_head." in name for header in _headers(model_dir) for name in header)


def num_parameters(model_dir: Path, config: dict[str, Any]) -> int:
    """Return the number of weights of a local checkpoint, by the files' headers, as before a quantization.

    Args:
        model_dir: The checkpoint; without weights the number is 0.
        config: Its config.json, whose `quantization` has the bits of all modules and those of some.

    Raises:
        EngineFailed: A header cannot be read.
    """
    found = config.get("quantization")
    quantization = found if isinstance(found, dict) else {}
    try:
        headers = [header.items() for header in _headers(model_dir)]
        tensors = {name: one for header in headers for name, one in header if name != "__metadata__"}
        return sum(_num_weights(name, tensors, quantization) for name in tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise EngineFailed(f"{model_dir}: a header of the weights cannot be read ({error!r})") from None


def _num_weights(name: str, tensors: dict[str, dict[str, Any]], quantization: dict[str, Any]) -> int:
    """Return the number of weights in a tensor; of scales and biases of quantized weights 0."""
    module, _, kind = name.rpartition(".")
    num, is_quantized = math.prod(tensors[name]["shape"]), f"{module}.scales" in tensors
    if not is_quantized or tensors.get(f"{module}.weight", {}).get("dtype") != "U32" or kind == "bias":
        return num
    if kind != "weight":
        return 0
    own = quantization.get(module)
    bits = (own if isinstance(own, dict) else quantization).get("bits")
    return num * 32 // bits if isinstance(bits, int) and bits > 0 else num


def _headers(model_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the header of each file of weights: tensors by name, and `__metadata__`."""
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            yield json.loads(file.read(length))


def _check_safetensors(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"the header length is {length} bytes; the limit is {min(size - 8, MAX_HEADER_BYTES)}")
            tensors = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise EngineFailed(f"{path}: this is not a readable safetensors file ({error})") from None
    if size < expected:
        raise EngineFailed(f"{path}: the file has {size} bytes, but its header declares {expected}; is it incomplete?")


MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

SAMPLE_BYTES = 4096


def fingerprint(model_dirs: Iterable[Path], *facts: str) -> str:
    """Return a hex digest of checkpoints and other facts.

    A checkpoint contributes its configurations, and name, shape and first 4 KiB of each tensor. Further training
    changes the start of every trained tensor; reading everything would take as long as loading the weights.

    Args:
        model_dirs: Directories of the checkpoints.
        facts: Other strings that the digest depends on.
    """
    digest = sha256("\0".join(facts).encode())
    for model_dir in model_dirs:
        for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
            if (path := model_dir / name).is_file():
                digest.update(name.encode() + path.read_bytes())
        for path in sorted(model_dir.glob("*.safetensors")):
            digest.update(path.name.encode())
            for sample in _samples(path):
                digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """Yield the header of a safetensors file and the first bytes of each tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        yield header
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                file.seek(8 + length + start)
                yield file.read(min(end - start, SAMPLE_BYTES))
