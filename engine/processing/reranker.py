"""Reranker: a causal cross-encoder, as the checkpoint's sentence-transformers files describe it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_optional_json
from engine.processing.sentence_transformers import (
    LOGIT_SCORE,
    is_cross_encoder,
    kind_of,
    read_max_tokens,
    read_modules,
    read_prompts,
    read_template_options,
)

SERVED_MODULES = ["Transformer", LOGIT_SCORE]
GENERATION_PROMPT = "add_generation_prompt"


@dataclass(frozen=True)
class Reranker:
    """A checkpoint whose next token tells whether a document answers a query, such as Qwen3-Reranker.

    sentence-transformers 5.4 defines its files: the score is the logit of one token minus that of another after the
    prompt, which the chat template makes from messages of the roles system (the instruction), query and document.
    """

    true_token_id: int
    """The token for a relevant document, such as yes."""
    false_token_id: int
    """The token for any other document, such as no."""
    instruction: str | None = None
    """The checkpoint's instruction; None: the one in the chat template."""
    max_tokens: int | None = None
    """Most tokens of a prompt; None: the context of the model."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    adds_generation_prompt: bool = False
    """Whether the template is asked for the beginning of an answer."""

    @classmethod
    def read(cls, model_dir: Path) -> "Reranker | None":
        """Read a checkpoint's files; return None for one that is no cross-encoder of sentence-transformers.

        Raises:
            EngineFailed: It is a cross-encoder that cannot be served, or a file has other contents than expected.
        """
        if not is_cross_encoder(model_dir):
            return None
        modules = read_modules(model_dir)
        if (kinds := [kind_of(module) for module in modules]) != SERVED_MODULES:
            raise EngineFailed(
                f"{model_dir}: cross-encoders with the modules {', '.join(kinds)} cannot be served; those with "
                f"{', '.join(SERVED_MODULES)}, such as Qwen3-Reranker, can"
            )
        path = model_dir / modules[1]["path"] / "config.json"
        tokens = read_optional_json(path)
        ids = tokens.get("true_token_id"), tokens.get("false_token_id")
        if not all(isinstance(one, int) for one in ids):
            raise EngineFailed(
                f"{path}: true_token_id and false_token_id are {ids[0]!r} and {ids[1]!r}; both must be token ids, as "
                "a score is the difference of their logits"
            )
        prompts, default = read_prompts(model_dir)
        options = dict(read_template_options(model_dir))
        adds_generation_prompt = options.pop(GENERATION_PROMPT, False) is True
        return cls(
            true_token_id=int(tokens["true_token_id"]),
            false_token_id=int(tokens["false_token_id"]),
            instruction=None if default is None else prompts[default] or None,
            max_tokens=read_max_tokens(model_dir),
            template_kwargs=options,
            adds_generation_prompt=adds_generation_prompt,
        )

    def messages(self, query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
        """Return the conversation for the chat template. instruction: None for the checkpoint's."""
        instruction = instruction or self.instruction
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        return [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]
