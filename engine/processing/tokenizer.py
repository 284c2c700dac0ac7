"""ChatTokenizer: conversations to token ids through the model's own template, and what the model says about stopping.

Text from a client never becomes a control token. Strings such as `<|im_end|>` inside messages are replaced by sentinels
while the template renders; afterwards the pieces between the sentinels are tokenised as usual and the strings
themselves as plain text. The idea is that of transformers' `sanitize_control_tokens`, which knows no roles, skips keys
and leaves lists of text parts that join into a control token.
"""

import inspect
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.processing.checkpoint import read_config, read_optional_json
from engine.processing.detokenizer import Detokenizer, TokenBytes
from engine.protocol import EngineFailed, InvalidRequest

IMAGE_PARTS = ("image_url", "image", "input_image")

RESERVED_KWARGS = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}
"""Names that a client may not set in the template: they are arguments of the rendering itself."""
RESERVED_KWARGS -= {"tools", "documents", "kwargs"}

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises on a conversation that it was not written for."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling that the checkpoint asks for where a request says nothing; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ChatTokenizer:
    """The tokenizer and chat template of one checkpoint. Several threads may use it at once.

    stop_token_ids: every id that ends an answer, by generation_config, config, tokenizer and template.
    keeps_late_system: the template takes a system message after other turns and leaves it in place.
    token_bytes: token id -> its bytes, see TokenBytes.
    image_token_id: the placeholder of a picture in the prompt, None for a model that sees none.
    Raises EngineFailed when the directory has no usable tokenizer.json or no chat template.
    """

    def __init__(self, model_dir: Path):
        config = read_config(model_dir)
        generation = read_optional_json(model_dir / "generation_config.json")
        self._renderer = _load_renderer(model_dir)
        self._tokenizer: Tokenizer = self._renderer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(self._tokenizer)
        self.token_bytes = TokenBytes(self._tokenizer)
        self.image_token_id: int | None = config.get("image_token_id", config.get("image_token_index"))
        self._media_token_ids = {config.get(key) for key in ("image_token_id", "image_token_index", "video_token_id")}
        self._accepts_parts = self._probe_parts()
        self.keeps_late_system = self._probe_late_system()
        self.stop_token_ids = self._find_stop_token_ids(config, generation)
        self.generation_defaults = _generation_defaults(generation)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any],
        image_tokens: Sequence[int] = (),
    ) -> np.ndarray:
        """The prompt that asks the model for its next turn, int32 [num_prompt_tokens].

        messages: canonical, see `deployments.chat.Message`; left as they are. template_kwargs: variables of the
        template, `tools` among them; `enable_thinking` is false unless given. image_tokens: for each picture in order
        of appearance, how many placeholders it takes.
        Raises InvalidRequest, also with the template's own words when the template refuses the conversation.
        """
        quarantine = Quarantine(self._control)
        try:
            conversation = [self._convert(i, message, quarantine) for i, message in enumerate(messages)]
            kwargs = quarantine.value(_checked_kwargs(template_kwargs))
        except RecursionError:
            raise InvalidRequest("the messages or tools are nested too deeply", "messages") from None
        rendered = self._render(conversation, {"enable_thinking": False, **kwargs}, quarantine.restore)
        ids = np.asarray(self._encode_rendered(rendered, quarantine), dtype=np.int32)
        num_images = sum(part == {"type": "image"} for message in conversation for part in _parts(message))
        return self._expand_images(ids, num_images, image_tokens)

    def encode_text(self, text: str) -> np.ndarray:
        """A raw prompt, int32 [num_tokens]: as the tokenizer does it, control tokens included, media placeholders not.

        Raises InvalidRequest.
        """
        media = {token for token, id_ in self._control.ids.items() if id_ in self._media_token_ids}
        quarantine = Quarantine(self._control)
        held = quarantine.text(text, _any_of(media))
        if not quarantine.held:
            return np.asarray(self._encode(text, add_special_tokens=True), dtype=np.int32)
        return np.asarray(self._encode_rendered(held, quarantine, add_special_tokens=True), dtype=np.int32)

    def detokenizer(self, stop: tuple[str, ...]) -> Detokenizer:
        return Detokenizer(self._tokenizer, stop)

    def _convert(self, index: int, message: Mapping[str, Any], quarantine: "Quarantine") -> dict[str, Any]:
        path = f"messages[{index}]"
        from_model = message.get("role") == "assistant"
        converted = {k: quarantine.value(v) for k, v in message.items() if k not in ("content", "tool_calls")}
        if (content := message.get("content")) is not None:
            converted["content"] = self._convert_content(content, path, quarantine, from_model)
        if calls := message.get("tool_calls"):
            converted["tool_calls"] = [
                quarantine.value(_parse_arguments(call, f"{path}.tool_calls[{i}]")) for i, call in enumerate(calls)
            ]
        return converted

    def _convert_content(self, content: Any, path: str, quarantine: "Quarantine", from_model: bool) -> Any:
        # An assistant's own <think> and <tool_call> are the template's business; its special tokens are nobody's.
        pattern = self._control.special if from_model else self._control.every
        if isinstance(content, str):
            return quarantine.text(content, pattern)
        parts = _media_and_text(content, f"{path}.content", pattern)
        if all(isinstance(part, str) for part in parts) and not self._accepts_parts:
            return quarantine.text("\n".join(parts), pattern)
        return [
            {"type": "text", "text": quarantine.text(part, pattern)} if isinstance(part, str) else part
            for part in parts
        ]

    def _render(
        self,
        conversation: list[dict[str, Any]],
        kwargs: dict[str, Any],
        restore: Callable[[str], str] = str,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            rendered = self._renderer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except TEMPLATE_ERRORS as error:
            reason = restore(str(error)) or type(error).__name__
            raise InvalidRequest(f"The model's chat template refuses this conversation: {reason}", "messages") from None
        return str(rendered)

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):
            raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair") from None

    def _encode_rendered(self, text: str, quarantine: "Quarantine", add_special_tokens: bool = False) -> list[int]:
        pieces = quarantine.split(text)
        ids = self._encode(pieces[0], add_special_tokens)
        for held, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += self._control.as_text[held]
            ids += _inside(self._encode, piece)
        return ids

    def _expand_images(self, ids: np.ndarray, num_images: int, image_tokens: Sequence[int]) -> np.ndarray:
        placeholders = ids == (-1 if self.image_token_id is None else self.image_token_id)
        num_placed = int(placeholders.sum())
        if not num_images == num_placed == len(image_tokens):
            raise InvalidRequest(
                f"the conversation has {num_images} images, the model's chat template placed {num_placed}, "
                f"and {len(image_tokens)} were prepared",
                "messages",
            )
        if not num_images:
            return ids
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[placeholders] = image_tokens
        return np.repeat(ids, repeats)

    def _probe(self, conversation: list[dict[str, Any]]) -> str:
        """A rendering without generation prompt, or '' when the template refuses."""
        try:
            return self._render(conversation, {"enable_thinking": False}, add_generation_prompt=False)
        except InvalidRequest:
            return ""

    def _probe_parts(self) -> bool:
        as_text = self._probe([{"role": "user", "content": "Qprobe"}])
        return as_text == self._probe([{"role": "user", "content": [{"type": "text", "text": "Qprobe"}]}]) != ""

    def _probe_late_system(self) -> bool:
        def in_place(*roles: str) -> bool:
            turns = [{"role": role, "content": f"Qprobe{i}"} for i, role in enumerate(roles)]
            return re.findall(r"Qprobe\d", self._probe(turns)) == [turn["content"] for turn in turns]

        return in_place("user", "assistant", "system", "user") and in_place("system", "user", "system", "user")

    def _find_stop_token_ids(self, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
        sources = [generation, config, config.get("text_config") or {}]
        ids = {id_ for source in sources for id_ in _as_ids(source.get("eos_token_id"))}
        ids.update(_as_ids(self._renderer.eos_token_id))
        ids.update(self._find_turn_end())
        return tuple(sorted(ids))

    def _find_turn_end(self) -> list[int]:
        """The special token that the template writes behind an assistant's answer, if it writes one."""
        turns = [{"role": "user", "content": "Qprobe"}, {"role": "assistant", "content": "Aprobe"}]
        _, _, tail = self._probe(turns).rpartition("Aprobe")
        first = self._encode(tail.lstrip())[:1]
        return [id_ for id_ in first if id_ in self._control.special_ids]


class ControlTokens:
    """The added tokens of a tokenizer, and how each is written in ordinary tokens."""

    def __init__(self, tokenizer: Tokenizer):
        added = tokenizer.get_added_tokens_decoder()
        # Some tokenizers add runs of spaces or line breaks: no control tokens, and found in every text.
        tokens = {id_: token for id_, token in added.items() if token.content.strip()}
        self.ids = {token.content: id_ for id_, token in tokens.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.every = _any_of(self.ids)
        self.special = _any_of(token.content for token in tokens.values() if token.special)
        plain = _without_added_tokens(tokenizer)
        self.as_text = {content: self._spell(plain, content) for content in self.ids}

    def _spell(self, plain: Tokenizer, content: str) -> list[int]:
        def encode(text: str) -> list[int]:
            return plain.encode(text, add_special_tokens=False).ids

        spelled = _inside(encode, content)
        if self.ids[content] not in spelled:
            return spelled
        return [id_ for char in content for id_ in _inside(encode, char)]  # the vocabulary holds it as a word


class Quarantine:
    """The control strings of one request, held back behind sentinels while its template renders."""

    def __init__(self, control: ControlTokens):
        self.held: list[str] = []
        self._every = control.every
        self._nonce = f"Q{secrets.token_hex(8)}Q"
        self._sentinel = re.compile(self._nonce + r"(\d+)Q")

    def text(self, text: str, pattern: re.Pattern[str]) -> str:
        return pattern.sub(self._hold, text)

    def value(self, value: Any) -> Any:
        """A copy of JSON-like data with the control strings of every key and string held back."""
        if isinstance(value, str):
            return self.text(value, self._every)
        if isinstance(value, Mapping):
            return {self.value(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def split(self, rendered: str) -> list[str]:
        """Text, held string, text, held string, ..., text."""
        if not self.held:
            return [rendered]
        pieces = self._sentinel.split(rendered)
        pieces[1::2] = [self.held[int(index)] for index in pieces[1::2]]
        return pieces

    def restore(self, text: str) -> str:
        return "".join(self.split(text))

    def _hold(self, match: re.Match[str]) -> str:
        self.held.append(match[0])
        return f"{self._nonce}{len(self.held) - 1}Q"


def _load_renderer(model_dir: Path) -> PreTrainedTokenizerFast:
    # By its generic class: tokenizer.json as it is shipped. AutoTokenizer picks a class by the model's type and
    # rebuilds the normalizer and the splitting pattern, which for the demo model are not those it was trained with.
    try:
        renderer = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise EngineFailed(f"{model_dir}: the tokenizer cannot be loaded ({error})") from None
    try:
        renderer.get_chat_template()
    except ValueError:
        raise EngineFailed(f"{model_dir}: no chat template in tokenizer_config.json or chat_template.jinja") from None
    return renderer


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    description = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))


def _inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of a piece from the middle of a text: encoded behind a line break that is then removed, because some
    tokenizers (SentencePiece) put a space at the start of every text."""
    line_break, ids = encode("\n"), encode("\n" + text)
    return ids[len(line_break) :] if ids[: len(line_break)] == line_break else encode(text)


def _any_of(strings: Any) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _checked_kwargs(template_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in template_kwargs:
        if name in RESERVED_KWARGS:
            raise InvalidRequest(f"{name!r} cannot be set for the chat template", f"chat_template_kwargs.{name}")
    return template_kwargs


def _media_and_text(content: Any, path: str, control: re.Pattern[str]) -> list[Any]:
    """Parts in order: text as str, a picture as the template's {"type": "image"}."""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"expected text or a list of parts, found {type(content).__name__}", path)
    parts: list[Any] = []
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            parts += [*_joined_if_control(texts, control), {"type": "image"}]
            texts = []
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InvalidRequest(f"a content part of type {kind!r} is not supported", f"{path}[{i}]")
    return parts + _joined_if_control(texts, control)


def _joined_if_control(texts: list[str], control: re.Pattern[str]) -> list[str]:
    """Neighbouring texts as they are, or as one where a control string begins in one and ends in another."""
    joined = "".join(texts)
    alone = [found for text in texts for found in control.findall(text)]
    return texts if control.findall(joined) == alone else [joined]


def _parse_arguments(call: Any, path: str) -> dict[str, Any]:
    """A copy of a tool call with its arguments as an object: clients send JSON text, templates read objects."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest("a tool call needs a function with name and arguments", f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest("the arguments are not valid JSON", f"{path}.function.arguments") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"the arguments must be a JSON object, found {type(arguments).__name__}", f"{path}.function.arguments"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _as_ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


def _generation_defaults(generation: dict[str, Any]) -> GenerationDefaults:
    def given(key: str, default: float) -> float:
        value = generation.get(key)
        return default if value is None else value

    greedy = generation.get("do_sample") is False
    return GenerationDefaults(
        temperature=0.0 if greedy else float(given("temperature", 1.0)),
        top_p=float(given("top_p", 1.0)),
        top_k=max(0, int(given("top_k", 0))),
        min_p=float(given("min_p", 0.0)),
        repetition_penalty=float(given("repetition_penalty", 1.0)),
    )
