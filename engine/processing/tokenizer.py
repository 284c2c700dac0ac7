"""ChatTokenizer: converts conversations to token ids with the model's chat template; stop tokens and formats."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.errors import EngineFailed, InvalidRequest
from engine.processing.answer_parser import AnswerParser, AnswerRules
from engine.processing.boundaries import Messages, RenderedPrompt, find_boundaries
from engine.processing.chat_template import ChatTemplate
from engine.processing.checkpoint import read_config, read_optional_json
from engine.processing.control_tokens import ControlTokenEscaper, ControlTokens, any_of, encode_inside, unmarked
from engine.processing.conversation import Conversation, TemplateForms, convert
from engine.processing.detokenizer import Detokenizer, TokenBytes, TokenDecoder
from engine.processing.generation_defaults import GenerationDefaults
from engine.processing.image_placeholder import ImagePlaceholder, SpecialStrings, one_run
from engine.processing.prompt_length import MAX_CHARS_PER_TOKEN, PromptLimit, TokenBound, count_windows
from engine.processing.reasoning_format import ReasoningFormat, find_reasoning_format
from engine.processing.text_pair import PairForm, TextPair
from engine.processing.tool_format import ToolFormat, find_tool_format, takes_argument_texts
from engine.processing.vision_families import vision_family
from engine.processing.vision_family import VisionFamily, image_token_id, in_frames, video_marker
from engine.protocol import Boundary, ImagePatches

MIN_BATCH_CHARS = 2048
"""Length from which texts are encoded by a call that releases the GIL, at a cost of a few microseconds."""

MIN_CONTROL_STRINGS = 100_000
"""Control strings below which a request is never refused for their number, since a template may drop their text."""

MAX_BEGINNINGS = 8
"""Size of the cache of encoded prompt beginnings, for long system messages that do not end with a control token."""


@dataclass(frozen=True)
class ChatPrompt:
    """A tokenized conversation."""

    token_ids: np.ndarray
    """int32 [num_prompt_tokens], with all image tokens."""
    boundaries: tuple[Boundary, ...]
    """At most one each of `system` and `turn`, ascending, with 0 < num_tokens < num_prompt_tokens."""


class ChatTokenizer:
    """The tokenizer and chat template of one checkpoint. Thread-safe.

    Attributes:
        stop_token_ids: Ids that end an answer, from generation_config, config, tokenizer and template.
        generation_defaults: The checkpoint's default sampling parameters.
        keeps_late_system: Whether the template accepts a system message after other turns and leaves it in place.
        token_bytes: Maps a token id to its bytes, see TokenBytes.
        image_token_id: Placeholder of an image in the prompt; None for a text model.
        reasoning: Format of thoughts; None if the template does not support thinking.
        tool_format: Format of tool calls; None if the template has no tools or the format is unknown.

    Raises:
        EngineFailed: The directory has no usable tokenizer.json or no chat template.
    """

    def __init__(self, model_dir: Path):
        config = read_config(model_dir)
        generation = read_optional_json(model_dir / "generation_config.json")
        family = vision_family(config)
        self._template = ChatTemplate(
            model_dir,
            plain_template=None if family is None else family.plain_template,
            adds_beginning=family is not None
            and family.begins_prompts(read_optional_json(model_dir / "tokenizer_config.json")),
        )
        words = "" if family is None else family.plain_tokens
        self._tokenizer: Tokenizer = unmarked(self._template.backend_tokenizer, words)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bound = TokenBound(self._tokenizer)
        self.token_bytes = TokenBytes(self._tokenizer)
        self.image_token_id: int | None = image_token_id(config)
        self._strings = strings = self._special_strings(model_dir, config)
        texts = [family.marker(strings)] if family is not None and family.marker_is_text and strings else []
        self._control = ControlTokens(self._tokenizer, words, texts)
        self._placeholder = one_run if family is None else family.placeholder
        self._images_first = None if family is None else family.images_first
        self._media_markers = None if self._strings is None else self._find_markers(config, family, self._strings)
        self._media_token_ids = {config.get(key) for key in ("image_token_id", "image_token_index", "video_token_id")}
        self._encode_known = lru_cache(MAX_BEGINNINGS)(lambda pieces: np.asarray(self._encode_pieces(pieces), np.int32))
        self.keeps_late_system = self._template.keeps_late_system()
        self.stop_token_ids = self._find_stop_token_ids(config, generation)
        self.generation_defaults = GenerationDefaults.of(generation)
        self.reasoning: ReasoningFormat | None = find_reasoning_format(self._template.probe_with, self._encode_piece)
        self._forms = TemplateForms(
            accepts_parts=self._template.accepts_parts(),
            image_in_text=None if family is None or not family.in_text or not strings else family.in_text(strings),
            argument_texts=takes_argument_texts(self._template.probe_with),
            thought_key=None if self.reasoning is None else self.reasoning.history_key,
        )
        self.tool_format: ToolFormat | None = find_tool_format(
            self._template.probe_with, self._template.source, self._control.special
        )

    def placeholder(self, image: ImagePatches) -> ImagePlaceholder:
        """Return what stands for an image in a prompt."""
        assert self._strings is not None, "a text model has no images"
        return self._placeholder(image, self._strings)

    def placeholders(self, images: Iterable[ImagePatches]) -> list[ImagePlaceholder]:
        """Return what stands for each image and each video in a prompt."""
        found = []
        for video, group in groupby(images, key=lambda image: None if image.frame is None else image.frame.video):
            if video is None:
                found += map(self.placeholder, group)
            else:
                assert self._strings is not None
                found.append(in_frames(list(group), self._strings))
        return found

    @property
    def template_variables(self) -> frozenset[str]:
        """Names in the chat template's source, see `ChatTemplate.variables`."""
        return self._template.variables

    @property
    def control_ids(self) -> Mapping[str, int]:
        """String to id of the added tokens, which ordinary tokens cannot spell."""
        return self._control.ids

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids of the added tokens that structure a prompt, without media placeholders."""
        return frozenset(self._control.ids.values()) - self._media_token_ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any],
        placeholders: Sequence[ImagePlaceholder] = (),
        limit: PromptLimit | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> np.ndarray:
        """Render and tokenize the prompt for the model's next turn.

        Args:
            messages: Canonical messages, see `engine.processing.message.Message`; not modified.
            template_kwargs: Template variables, such as `tools`; `enable_thinking` defaults to false.
            placeholders: What stands for each image, in order of appearance, see `placeholder`.
            limit: Ends the work as soon as the prompt is certainly too long or no longer needed.
            continue_final_message: Whether the prompt ends with the text of the final message, the assistant's, which
                the answer continues.
            add_generation_prompt: Whether the prompt ends with the beginning of an answer.

        Returns:
            int32 [num_prompt_tokens].

        Raises:
            InvalidRequest: The conversation is invalid, or the template refuses it with this message.
            ContextLengthExceeded, ClientDisconnected: See PromptLimit.check.
        """
        conversation = self._convert(messages, template_kwargs, limit)
        _, ids = self._encode_conversation(
            conversation, placeholders, limit, continue_final_message, add_generation_prompt
        )
        return np.repeat(ids, self._image_repeats(ids, placeholders))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any],
        placeholders: Sequence[ImagePlaceholder] = (),
        limit: PromptLimit | None = None,
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """Render and tokenize as `encode_chat`, and find the boundaries. Raises what `encode_chat` raises."""
        conversation = self._convert(messages, template_kwargs, limit)
        text, ids = self._encode_conversation(conversation, placeholders, limit, continue_final_message)
        ends = np.cumsum(repeats := self._image_repeats(ids, placeholders))
        prompt = RenderedPrompt(text, ids, self._control, partial(self._encode_beginning, conversation.quarantine))

        def render(messages: Messages, add_generation_prompt: bool) -> str | None:
            if limit is not None:
                limit.check(0)  # each rendering takes as long as the first
            other = self._template.try_render(conversation.kwargs, messages, add_generation_prompt)
            return None if other is None else self._with_placeholders(other, placeholders)

        cuts = find_boundaries(conversation.messages, prompt, render)
        boundaries = tuple(Boundary(cut.kind, int(ends[cut.num_tokens - 1])) for cut in cuts)
        return ChatPrompt(np.repeat(ids, repeats), boundaries)

    def encode_text(self, text: str, limit: PromptLimit | None = None, adds_special: bool = True) -> np.ndarray:
        """Tokenize a raw prompt, int32 [num_tokens]. Control tokens are recognised, media placeholders are escaped.

        Args:
            text: The prompt.
            limit: See `encode_chat`.
            adds_special: Whether the tokenizer adds its own special tokens, such as one at the beginning.

        Raises:
            InvalidRequest: The text is not valid Unicode.
            ContextLengthExceeded, ClientDisconnected: See PromptLimit.check.
        """
        media = {token for token, id_ in self._control.ids.items() if id_ in self._media_token_ids}
        quarantine = ControlTokenEscaper(self._control)
        held = quarantine.text(text, any_of(media))
        pieces = quarantine.split(held)
        if limit is not None:
            self._check_length(pieces, limit)
        return np.asarray(self._encode_pieces(pieces, add_special_tokens=adds_special, limit=limit), dtype=np.int32)

    def encode_pair(self, first: str, second: str, limit: PromptLimit | None = None) -> TextPair:
        """Tokenize two texts as one input of an encoder. Neither text can spell a control token.

        Args:
            first: The query.
            second: The document.
            limit: See `encode_chat`.

        Raises:
            InvalidRequest: A text is not valid Unicode.
            EngineFailed: The tokenizer does not join two texts in a supported form.
            ContextLengthExceeded, ClientDisconnected: See PromptLimit.check.
        """
        ids = []
        for text in (first, second):
            quarantine = ControlTokenEscaper(self._control)
            pieces = quarantine.split(quarantine.text(text, self._control.every))
            if limit is not None:
                self._check_length(pieces, limit)
            ids.append(self._encode_pieces(pieces, limit=limit))
        pair = self._pair_form.join(*ids)
        if limit is not None:
            limit.check(len(pair.token_ids), is_lower_bound=False)
        return pair

    @cached_property
    def _pair_form(self) -> PairForm:
        return PairForm.of(self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def detokenizer(self, stop: tuple[str, ...]) -> Detokenizer:
        return Detokenizer(self._tokenizer, stop)

    def answer_parser(self, rules: AnswerRules) -> AnswerParser:
        """Return a parser for one choice."""
        if rules.is_raw:
            return AnswerParser(TokenDecoder(self._tokenizer), rules, None, None)
        decoder = TokenDecoder(self._tokenizer, self._markers if rules.tools else self._thought_markers)
        return AnswerParser(decoder, rules, self.reasoning, self.tool_format)

    @cached_property
    def _thought_markers(self) -> dict[int, str]:
        return self._special_in(() if self.reasoning is None else self.reasoning.markers)

    @cached_property
    def _markers(self) -> dict[int, str]:
        return self._thought_markers | self._special_in(() if self.tool_format is None else self.tool_format.markers)

    def _special_in(self, markers: Sequence[str]) -> dict[int, str]:
        """Return the special tokens that occur in one of the markers, which decoded text must keep: id to text."""
        return {
            id_: content
            for content, id_ in self._control.ids.items()
            if id_ in self._control.special_ids and any(content in marker for marker in markers)
        }

    def _convert(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any], limit: PromptLimit | None
    ) -> Conversation:
        def check(num_held: int) -> None:
            if limit is not None:
                limit.check(num_held if num_held > MIN_CONTROL_STRINGS else 0)

        return convert(messages, template_kwargs, ControlTokenEscaper(self._control, check), self._forms)

    def _encode_conversation(
        self,
        conversation: Conversation,
        placeholders: Sequence[ImagePlaceholder],
        limit: PromptLimit | None,
        continue_final_message: bool,
        add_generation_prompt: bool = True,
    ) -> tuple[str, np.ndarray]:
        """Return the rendered prompt with escaped control strings, and its ids with one token per run of image tokens.

        Raises InvalidRequest, also if the template does not place every image.
        """
        quarantine = conversation.quarantine
        if continue_final_message:
            text = self._template.render_unfinished(conversation)
        else:
            how = {"add_generation_prompt": add_generation_prompt, "restore": quarantine.restore}
            text = self._template.render(conversation.kwargs, conversation.messages, **how)
        self._check_images(conversation.num_images, text, len(placeholders))
        text = self._with_placeholders(text, placeholders)
        pieces = quarantine.split(text)
        if limit is not None:
            self._check_length(pieces, limit)
        return text, np.asarray(self._encode_pieces(pieces, limit=limit), dtype=np.int32)

    def _check_length(self, pieces: Sequence[str], limit: PromptLimit) -> None:
        """Raise ContextLengthExceeded if it is certain before all pieces are encoded.

        The rendered text is measured instead of the messages, since a template may drop parts of these, such as old
        thoughts. Rendering is a small part of the work.
        """
        num_tokens = sum(len(self._control.as_text[held]) for held in pieces[1::2])
        num_tokens += sum(map(self._bound.of, pieces[::2]))
        limit.check(num_tokens)
        for piece in pieces[::2]:
            if len(piece) > MAX_CHARS_PER_TOKEN * limit.max_text_tokens:
                for num_counted in count_windows(self._tokenizer, piece):
                    limit.check(num_counted)

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            if len(text) < MIN_BATCH_CHARS:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoded.ids
        except (TypeError, UnicodeError):
            raise InvalidRequest("the text is not valid Unicode: it contains an unpaired surrogate") from None

    def _encode_beginning(self, quarantine: ControlTokenEscaper, text: str) -> np.ndarray:
        return self._encode_known(tuple(quarantine.split(text)))

    def _encode_pieces(
        self, pieces: Sequence[str], add_special_tokens: bool = False, limit: PromptLimit | None = None
    ) -> list[int]:
        """Encode text and control strings in turn, see `ControlTokenEscaper.split`."""
        ids = self._encode(pieces[0], add_special_tokens)
        for held, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            if limit is not None:
                limit.check(len(ids))
            ids += self._control.as_text[held]
            ids += encode_inside(self._encode, piece)
        if limit is not None:
            limit.check(len(ids), is_lower_bound=False)
        return ids

    def _check_images(self, num_images: int, rendered: str, num_prepared: int) -> None:
        num_placed = 0 if self._media_markers is None else len(self._media_markers.findall(rendered))
        if not num_images == num_placed == num_prepared:
            raise InvalidRequest(
                f"the conversation has {num_images} images, the model's chat template placed {num_placed}, "
                f"and {num_prepared} were prepared",
                "messages",
            )

    def _with_placeholders(self, rendered: str, placeholders: Sequence[ImagePlaceholder]) -> str:
        """Replace the template's markers by the placeholders, in order; further markers stay."""
        if self._media_markers is None:
            return rendered
        if self._images_first:
            return self._behind_images(self._media_markers, rendered, placeholders)
        if not placeholders:
            return rendered
        left = iter(placeholders)

        def replaced(match: re.Match[str]) -> str:
            placeholder = next(left, None)
            return match[0] if placeholder is None else placeholder.text

        return self._media_markers.sub(replaced, rendered)

    def _behind_images(self, markers: re.Pattern[str], rendered: str, placeholders: Sequence[ImagePlaceholder]) -> str:
        """Put the placeholders behind or before the beginning of the prompt, and then the text without the markers."""
        found = list(markers.finditer(rendered))[: len(placeholders)]
        for match in reversed(found):
            rendered = rendered[: match.start()] + rendered[match.end() :]
        beginning, images = self._template.beginning, "".join(one.text for one in placeholders[: len(found)])
        text = rendered.removeprefix(beginning)
        if self._images_first == "before bos":
            return f"{images}{beginning}{text}"
        return f"{beginning}{images}{'' if text[:1].isspace() else ' '}{text}"

    def _image_repeats(self, ids: np.ndarray, placeholders: Sequence[ImagePlaceholder]) -> np.ndarray:
        """Return the repetitions of each token, 1 except for image tokens, int64 [len(ids)]."""
        runs = [num_tokens for one in placeholders for num_tokens in one.runs]
        places = np.flatnonzero(ids == (-1 if self.image_token_id is None else self.image_token_id))
        if len(places) != len(runs):
            raise InvalidRequest(
                f"the prompt has {len(places)} runs of image tokens, its images have {len(runs)}", "messages"
            )
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = runs
        return repeats

    def _special_strings(self, model_dir: Path, config: dict[str, Any]) -> SpecialStrings | None:
        token = None if self.image_token_id is None else self._tokenizer.id_to_token(self.image_token_id)
        if token is None:
            return None
        files = ("tokenizer_config.json", "processor_config.json")
        more = [read_optional_json(model_dir / name) for name in files]
        by_id = {key: self._tokenizer.id_to_token(id_) for key, id_ in config.items() if _is_token_id(key, id_)}
        return SpecialStrings(token, {**more[0], **more[1], **{k: v for k, v in by_id.items() if v is not None}})

    def _find_markers(
        self, config: dict[str, Any], family: VisionFamily | None, strings: SpecialStrings
    ) -> re.Pattern[str]:
        """Return a pattern of what the template writes for an image or a video.

        A client's text must not be able to spell it. Raises EngineFailed.
        """
        if family is None:
            return any_of([strings.image])
        marker = family.marker(strings)
        if marker not in self._control.ids and not family.marker_is_text:
            raise EngineFailed(f"the tokenizer has no token {marker!r}, which stands for an image in its chat template")
        has_videos = config.get("model_type") in family.videos
        return any_of([marker, video_marker(strings)] if has_videos else [marker])

    def _encode_piece(self, text: str) -> tuple[int, ...]:
        return tuple(encode_inside(self._encode, text))

    def _find_stop_token_ids(self, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
        sources = [generation, config, config.get("text_config") or {}]
        ids = {id_ for source in sources for id_ in _as_ids(source.get("eos_token_id"))}
        ids.update(_as_ids(self._template.eos_token_id))
        ids.update(self._find_turn_end())
        return tuple(sorted(ids))

    def _find_turn_end(self) -> list[int]:
        """Return the special token that the template writes after an assistant's answer, if any."""
        turns = [{"role": "user", "content": "Qprobe"}, {"role": "assistant", "content": "Aprobe"}]
        _, _, tail = self._template.probe(turns).rpartition("Aprobe")
        first = self._encode(tail.lstrip())[:1]
        return [id_ for id_ in first if id_ in self._control.special_ids]


def _is_token_id(key: str, value: Any) -> bool:
    return key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 0


def _as_ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())
