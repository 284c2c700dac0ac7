"""ChatTemplate: renders conversations with a checkpoint's chat template, and finds what the template supports."""

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from tokenizers import Tokenizer

from engine.errors import EngineFailed, InvalidRequest
from engine.processing.boundaries import Messages
from engine.processing.checkpoint import read_optional_json
from engine.processing.conversation import DEFAULT_KWARGS, Conversation
from engine.processing.encoders import is_encoder_checkpoint
from engine.processing.plain_templates import CONTENTS
from engine.processing.pooling import EmbeddingModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template may raise for an unsupported conversation."""


class ChatTemplate:
    """The chat template of one checkpoint, and the tokenizer that it is loaded with. Thread-safe.

    Args:
        model_dir: The checkpoint.
        plain_template: The template if the checkpoint has none; None: it must have one.
        adds_beginning: Whether each prompt begins with the tokenizer's bos token, or its eos token if there is none,
            also if the template does not write it.

    Raises:
        EngineFailed: The directory has no usable tokenizer.json or no chat template.
    """

    def __init__(self, model_dir: Path, plain_template: str | None = None, adds_beginning: bool = False):
        self._renderer = _load_renderer(model_dir, CONTENTS if _reads_plain_text(model_dir) else plain_template)
        beginning: Any = self._renderer.bos_token or self._renderer.eos_token if adds_beginning else None
        self.beginning = str(beginning or "")
        """Text at the beginning of each prompt; '' for none."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json."""
        return self._renderer.backend_tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token; None without one."""
        id_: Any = self._renderer.eos_token_id
        return id_

    @property
    def source(self) -> str:
        """The template itself."""
        template = self._renderer.chat_template
        return template if isinstance(template, str) else str(template)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names in the source: a template variable that is not among them has no effect."""
        tokens = [token[1:] for token in jinja2.Environment().lex(self.source)]
        words = [token for token in tokens if token[0] != "whitespace"]
        return frozenset(
            text
            for (_, before), (kind, text) in zip([("", ""), *words], words, strict=False)
            if kind == "name" and before != "."
        )

    def render(
        self,
        kwargs: dict[str, Any],
        messages: Messages,
        add_generation_prompt: bool = True,
        restore: Callable[[str], str] = str,
    ) -> str:
        """Render a conversation.

        Args:
            kwargs: Template variables.
            messages: In the form of the template, see `Conversation.messages`.
            add_generation_prompt: Whether the text ends with the beginning of an answer.
            restore: Restores the escaped control strings in the template's own error message.

        Raises:
            InvalidRequest: The template refuses the conversation with this message.
        """
        try:
            rendered = self._renderer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except TEMPLATE_ERRORS as error:
            reason = restore(str(error)) or type(error).__name__
            raise InvalidRequest(f"The model's chat template rejects this conversation: {reason}", "messages") from None
        return self._begun(str(rendered))

    def render_unfinished(self, conversation: Conversation) -> str:
        """Render the conversation up to the end of its final message's text. Raises InvalidRequest."""
        try:
            rendered = self._renderer.apply_chat_template(
                conversation.messages, tokenize=False, continue_final_message=True, **conversation.kwargs
            )
        except TEMPLATE_ERRORS:  # transformers' message contains the whole conversation
            raise InvalidRequest("The model's chat template cannot continue the final message", "messages") from None
        return self._begun(str(rendered))

    def _begun(self, rendered: str) -> str:
        return rendered if rendered.startswith(self.beginning) else self.beginning + rendered

    def try_render(self, kwargs: dict[str, Any], messages: Messages, add_generation_prompt: bool) -> str | None:
        """Render as `render`; return None if the template refuses."""
        try:
            return self.render(kwargs, messages, add_generation_prompt)
        except InvalidRequest:
            return None

    def probe(self, messages: Messages) -> str:
        """Render without generation prompt; return '' if the template refuses."""
        return self.try_render(dict(DEFAULT_KWARGS), messages, False) or ""

    def probe_with(self, messages: Messages, add_generation_prompt: bool = False, **kwargs: Any) -> str | None:
        """Render with these template variables beside the default ones; return None if the template refuses."""
        return self.try_render({**DEFAULT_KWARGS, **kwargs}, messages, add_generation_prompt)

    def accepts_parts(self) -> bool:
        """Return whether the template accepts a list of text parts as content."""
        as_text = self.probe([{"role": "user", "content": "Qprobe"}])
        return as_text == self.probe([{"role": "user", "content": [{"type": "text", "text": "Qprobe"}]}]) != ""

    def keeps_late_system(self) -> bool:
        """Return whether the template accepts a system message after other turns and leaves it in place."""

        def in_place(*roles: str) -> bool:
            turns = [{"role": role, "content": f"Qprobe{i}"} for i, role in enumerate(roles)]
            return re.findall(r"Qprobe\d", self.probe(turns)) == [turn["content"] for turn in turns]

        return in_place("user", "assistant", "system", "user") and in_place("system", "user", "system", "user")


def _reads_plain_text(model_dir: Path) -> bool:
    return is_encoder_checkpoint(model_dir) or EmbeddingModel.read(model_dir) is not None


def _load_renderer(model_dir: Path, plain_template: str | None) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast  # takes a second, so only processes that render import it

    # The generic class uses tokenizer.json as it is. AutoTokenizer selects a class by model type and rebuilds the
    # normalizer and the splitting pattern, which for the demo model differ from those of its training.
    try:
        renderer = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # tokenizers raises a bare Exception for a broken file
        raise EngineFailed(f"{model_dir}: the tokenizer cannot be loaded ({error})") from None
    if renderer.chat_template is None:  # where older vision models have it
        renderer.chat_template = read_optional_json(model_dir / "chat_template.json").get("chat_template")
    try:
        renderer.get_chat_template()
    except ValueError:
        if plain_template is None:
            places = "tokenizer_config.json, chat_template.jinja or chat_template.json"
            raise EngineFailed(f"{model_dir}: no chat template in {places}") from None
        renderer.chat_template = plain_template
    return renderer
