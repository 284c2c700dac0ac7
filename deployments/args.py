"""AppArgs: the `args` section of serve_config.yaml. Imports neither Ray nor MLX, for checks before Ray starts."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from deployments.http.config import HttpConfig
from deployments.http.errors import is_tag
from deployments.http.openai.tool_wire import Tools, check_tools
from deployments.tracing import TracingConfig, why_not
from engine.config import EngineConfig, Frozen
from engine.demo import has_tokenizer_of_demo
from engine.errors import InvalidRequest
from engine.gpus import MAX_ENGINES, num_engines
from engine.media_config import MediaConfig
from engine.spec_prefill_config import SpecPrefillConfig

DRAIN_TIMEOUT_S = 25.0

_WIRE_TOOLS = TypeAdapter(Tools)


def _with_tools_of_requests(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the tools of pinned prompts normalized as those of requests are.

    Raises:
        ValueError: A request with these tools would be rejected.
    """
    pinned = []
    for i, prompt in enumerate(config.prefix_cache.pinned):
        field = f"prefix_cache.pinned.{i}.tools"
        try:
            wire = _WIRE_TOOLS.validate_python(list(prompt.tools))
            sent = [tool.tool(f"{field}.{j}") for j, tool in enumerate(wire)]
            tools = tuple(tool.definition for tool in check_tools(sent))
        except ValidationError as error:
            first = error.errors()[0]
            path = [field, *(str(step) for step in first["loc"] if not is_tag(step))]
            raise ValueError(f"{'.'.join(path)}: {first['msg']}") from None
        except InvalidRequest as error:
            raise ValueError(f"{field}: {error}") from None
        pinned.append(prompt.model_copy(update={"tools": tools}))
    return config.model_copy(
        update={"prefix_cache": config.prefix_cache.model_copy(update={"pinned": tuple(pinned)})} if pinned else {}
    )


class AppArgs(Frozen):
    """The arguments of build_app. Options that would have no effect are errors."""

    engine: Annotated[EngineConfig, AfterValidator(_with_tools_of_requests)] = Field(
        default_factory=lambda: EngineConfig(), description="model and engine settings, the same on every node"
    )
    engines_per_node: Literal["all"] | Annotated[int, Field(ge=1, le=MAX_ENGINES)] = Field(
        default="all",
        description="engines of each node, each with all of the model's weights and an NVIDIA GPU of its own; all: one "
        "per GPU that CUDA_VISIBLE_DEVICES shows, without one a single engine; a number: the same on every node, at "
        "most its GPUs (on a CPU any, which divide its memory: for tests)",
    )
    spec_prefill: SpecPrefillConfig = Field(
        default_factory=lambda: SpecPrefillConfig(), description="sparse prefill of long prompts"
    )
    media: MediaConfig = Field(
        default_factory=lambda: MediaConfig(), description="limits on the images and videos of a request"
    )
    http: HttpConfig = Field(default_factory=lambda: HttpConfig(), description="limits, keys and rules of the HTTP API")
    tracing: TracingConfig = Field(default_factory=lambda: TracingConfig(), description="traces of requests")
    drain_timeout_s: float = Field(
        default=DRAIN_TIMEOUT_S,
        ge=0,
        le=3600,
        description="seconds that running requests get to finish when the server stops or is redeployed; after that "
        "they end with an error",
    )
    resume: bool = Field(
        default=True,
        description="whether an answer whose engine is lost, or must leave, goes on at another engine with the tokens "
        "that would have come; a request may say otherwise with the header X-Orchard-Resume: on or off",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="model name that clients send; null: 'demo', the directory's name, or the hub repository",
    )

    @property
    def model_name(self) -> str:
        """The model name in requests and answers."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.engine.model).expanduser()
        return path.resolve().name if path.is_dir() else self.engine.model

    def engines_here(self) -> int:
        """Return the number of engines of this machine. Raises EngineFailed if there are fewer GPUs."""
        return num_engines(self.engines_per_node, self.engine.device)

    @property
    def sparse_prefill_off(self) -> str | None:
        """Reason why sparse prefill is off; None if it is on."""
        if not self.spec_prefill.enabled:
            return "spec_prefill.enabled is false"
        if self.spec_prefill.draft_model is None and not has_tokenizer_of_demo(self.engine.model):
            return f"no draft_model is set for {self.engine.model}"
        return None

    def resolved(self) -> "AppArgs":
        """Return the arguments with the settled name and sparse prefill, which depend on files of this machine."""
        spec_prefill = self.spec_prefill.model_copy(update={"enabled": self.sparse_prefill_off is None})
        return self.model_copy(update={"served_model_name": self.model_name, "spec_prefill": spec_prefill})

    @model_validator(mode="after")
    def _effective(self) -> "AppArgs":
        if mistakes := [*self._sparse_prefill_mistakes(), *self._other_mistakes()]:
            raise ValueError("\n".join(mistakes))
        return self

    def _sparse_prefill_mistakes(self) -> list[str]:
        config, model = self.spec_prefill, self.engine.model
        changed = [name for name in config.changed() if name != "enabled"]
        if config.draft_model == "demo" and config.enabled and not has_tokenizer_of_demo(model):
            return [
                f"spec_prefill.draft_model: the demo's draft model does not have the tokenizer of {model!r}; set a "
                "small model with the same tokenizer, or remove the option to disable sparse prefill for this model"
            ]
        if (off := self.sparse_prefill_off) is not None:
            remedy = " (set spec_prefill.draft_model)" if config.enabled else ""
            return [f"spec_prefill.{name}: has no effect, as {off}{remedy}" for name in changed]
        mistakes = []
        if config.draft_model in (None, "demo") and config.draft_revision is not None:
            mistakes.append("spec_prefill.draft_revision: has no effect, as the demo's draft model has no revisions")
        if "threshold_tokens" in changed and config.threshold_tokens > config.max_tokens_scored:
            mistakes.append(
                f"spec_prefill.threshold_tokens: {config.threshold_tokens} has no effect, as prompts of more than "
                f"{config.max_tokens_scored} tokens (max_tokens_scored) are always prefilled densely"
            )
        return mistakes

    def _other_mistakes(self) -> list[str]:
        mistakes = []
        if self.tracing.endpoint is not None and (reason := why_not()) is not None:
            mistakes.append(f"tracing.endpoint: {reason}")
        if self.tracing.endpoint is None and self.tracing.changed():
            mistakes.append(f"tracing.{self.tracing.changed()[0]}: has no effect, as tracing.endpoint is null")
        if self.http.needs_key and self.http.open:
            mistakes.append(
                "http.open: has no effect, as http.api_keys, http.api_keys_file or http.api_keys_env is set and every "
                "request needs a key"
            )
        return mistakes
