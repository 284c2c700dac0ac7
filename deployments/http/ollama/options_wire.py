"""The field `options` of Ollama's requests: which options are honoured, ignored by name, or refused."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deployments.http.errors import shown
from deployments.http.fields import FieldRules, UnknownFields, split_fields
from deployments.http.wire import INT32_MAX, MAX_STOP_CHARS, MAX_STOP_STRINGS, Wire
from engine.errors import InvalidRequest

WITHOUT_EFFECT = frozenset(
    {
        # chosen once, when the model is loaded
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa", "low_vram",
        "f16_kv", "vocab_only", "logits_all", "embedding_only", "draft_num_predict",
        # nothing is cut out of a conversation that outgrows the context
        "num_keep",
        # no longer options of Ollama itself
        "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline",
    }
)  # fmt: skip
"""Options that are accepted with any value, have no effect, and are named in X-Orchard-Ignored."""

RULES = FieldRules(neutral={"options.typical_p": (1, 1.0)})

UNLIMITED = (-1, -2)
"""Values of num_predict for an answer that only the context limits."""


def _whole(value: Any) -> Any:
    """Return a float without fraction as an integer: some clients have only floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class OllamaOptions(Wire):
    """The options that are honoured.

    `repeat_penalty` counts tokens of the prompt and the answer, `presence_penalty` and `frequency_penalty` those of the
    answer; `repeat_last_n` 0 turns all three off, and other values do not shorten what they look at.
    """

    num_predict: Annotated[Whole, Field(ge=-2, le=INT32_MAX)] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: Annotated[Whole, Field(ge=-1, le=INT32_MAX)] | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        ]
        | None
    ) = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=INT32_MAX)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)


def split_options(raw: Mapping[str, Any], unknown: UnknownFields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a body with the honoured options alone, and the paths of those that are ignored.

    Raises InvalidRequest for an option that cannot be honoured; a value of another type stays for the wire model.
    """
    sent = raw.get("options")
    if not isinstance(sent, dict):
        return dict(raw), ()
    without_effect = [f"options.{name}" for name in sent if name in WITHOUT_EFFECT]
    rest = {f"options.{name}": value for name, value in sent.items() if name not in WITHOUT_EFFECT}
    honoured, ignored = split_fields(rest, [f"options.{name}" for name in OllamaOptions.model_fields], RULES, unknown)
    options = {name.removeprefix("options."): value for name, value in honoured.items()}
    if options.get("repeat_last_n", -1) not in (None, 0, -1):
        without_effect.append("options.repeat_last_n")
    return {**raw, "options": options}, (*without_effect, *ignored)


def sampling_fields(options: OllamaOptions | None) -> dict[str, Any]:
    """Return the fields of a ChatRequest that options set. Raises InvalidRequest."""
    options = options or OllamaOptions.model_validate({})
    limit, seed = options.num_predict, options.seed
    if limit == 0:
        raise InvalidRequest(
            f"`options.num_predict` is {shown(limit)}: it must be at least 1, or one of {UNLIMITED} for no limit.",
            "options.num_predict",
        )
    penalizes = options.repeat_last_n != 0
    return {
        "max_tokens": None if limit in UNLIMITED else limit,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "min_p": options.min_p,
        "seed": None if seed is None or seed == -1 else seed % 2**64,
        "stop": tuple(options.stop or ()),
        "presence_penalty": (options.presence_penalty or 0.0) if penalizes else 0.0,
        "frequency_penalty": (options.frequency_penalty or 0.0) if penalizes else 0.0,
        "repetition_penalty": options.repeat_penalty if penalizes else 1.0,
    }
