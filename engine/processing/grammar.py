"""GrammarCompiler: compiles grammars for constrained output, once per text, off the event loop; one matcher per row.

llguidance (Rust) does the work: an Earley parser over a lexer of regex derivatives that reads the bytes of tokens. It
distinguishes control tokens from text: a JSON string may spell `<think>` in ordinary tokens, but never has the token.
"""

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.numpy import fill_next_token_bitmask

from engine.config import GrammarConfig
from engine.errors import EngineFailed, InvalidRequest, Overloaded
from engine.processing.free_limits import FreeLimits
from engine.processing.grammar_build import build_matcher, byte_tokenizer, first_words, limits, with_deep_stack
from engine.processing.json_schema import strict_schema, with_options
from engine.processing.schema_culprits import find_culprits
from engine.protocol import GrammarSpec

COMPILE_THREADS = 2
MAX_PENDING = 16
CACHE_SIZE = 16

LARK_HEAD = "%llguidance {}\n"
NO_FORCING = '%llguidance {"no_forcing": true}\n'
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
DIGITS_AT_HYPHEN = re.compile(r"-\\[dD]|\\[dD]-")
TERMINAL = re.compile(r"[A-Z][A-Z0-9_]*:")
"""Terminals with expressions in the grammars of tool calls say what text does not contain."""

Key = tuple[str, str]


class GrammarCompiler:
    """Compiles the grammars of one model.

    Args:
        model_dir: Directory with tokenizer.json.
        vocab_size: Width of the logits; ids unknown to the tokenizer are never allowed.
        stop_token_ids: Tokens that may end the output.
        config: Limits.
        free_limits: Where strings and arrays end that a JSON Schema does not limit; None: where the model ends them.

    Raises:
        EngineFailed: llguidance, which supports byte-level and byte-fallback BPE, cannot read tokenizer.json.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        config: GrammarConfig,
        free_limits: FreeLimits | None = None,
    ):
        self._config = config
        self._free_limits = free_limits
        self._tokenizer, self._control_strings = _load_tokenizer(model_dir, vocab_size, stop_token_ids)
        self._executor = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()  # guards the two fields below, which compiling threads change too
        self._compiled: OrderedDict[Key, LLMatcher] = OrderedDict()
        self._pending: dict[Key, Future[LLMatcher]] = {}

    async def compile(self, spec: GrammarSpec) -> "GrammarMatcher":
        """Return a matcher at the start of the output. Equal texts are compiled once, also for concurrent callers.

        Raises:
            InvalidRequest: The grammar is too large, takes too long, or is invalid or not supported.
            Overloaded: Too many grammars are waiting to be compiled.
            EngineFailed: The engine is stopping.
        """
        num_bytes = len(spec.text.encode(errors="surrogatepass"))
        if num_bytes > self._config.max_bytes:
            raise _invalid(spec, f"the grammar has {num_bytes} bytes; the limit is {self._config.max_bytes}")
        with self._lock:
            future = self._find_or_begin(spec)
        prototype = future if isinstance(future, LLMatcher) else await self._wait(future, spec)
        with self._lock:
            return GrammarMatcher(prototype.deep_copy(), self._tokenizer)

    def close(self) -> None:
        """Cancel waiting compilations; running ones end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _find_or_begin(self, spec: GrammarSpec) -> "LLMatcher | Future[LLMatcher]":
        key = (spec.kind, spec.text)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        if key in self._pending:
            return self._pending[key]
        if len(self._pending) >= MAX_PENDING:
            raise self._busy()
        try:  # submit starts the executor's threads
            self._pending[key] = with_deep_stack(lambda: self._executor.submit(self._compile, spec, key))
        except RuntimeError:
            raise EngineFailed("the grammar was not compiled: the engine is shutting down") from None
        return self._pending[key]

    async def _wait(self, future: "Future[LLMatcher]", spec: GrammarSpec) -> LLMatcher:
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as retrieved
        # asyncio.wait_for would cancel the future, which other callers may await.
        await asyncio.wait((waiting,), timeout=self._config.compile_timeout_s)
        if not waiting.done():
            if not future.running():
                raise self._busy()
            raise _invalid(spec, f"the grammar takes longer than {self._config.compile_timeout_s:g} s to compile")
        if waiting.cancelled():
            raise EngineFailed("the grammar was not compiled: the engine is shutting down")
        try:
            return waiting.result()
        except ValueError as error:
            raise _invalid(spec, str(error)) from None

    def _busy(self) -> Overloaded:
        message = f"{len(self._pending)} grammars are queued for compilation; {COMPILE_THREADS} are compiled at a time"
        return Overloaded(message, self._config.compile_timeout_s, "compile_timeout_s")

    def _compile(self, spec: GrammarSpec, key: Key) -> LLMatcher:
        """Compile a grammar and cache it; runs in a thread of the executor. Raises ValueError with the reason."""
        try:
            source = partial(_source, spec, self._control_strings, self._free_limits)
            matcher = build_matcher(self._tokenizer, source)
            with self._lock:
                self._compiled[key] = matcher
                if len(self._compiled) > CACHE_SIZE:
                    self._compiled.popitem(last=False)
            return matcher
        except ValueError as error:
            raise ValueError(_place_of(error, spec)) from None
        finally:
            with self._lock:
                self._pending.pop(key, None)


class GrammarMatcher:
    """State of one row's grammar; a `core.row.Matcher`. Not thread-safe.

    After a stop token, and at the end of the grammar, exactly the stop tokens are allowed.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, ended: bool = False):
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(tokenizer.eos_tokens)
        self._ended = ended

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        """Return the masks for the next token and after each draft token; see `core.row.Matcher`.

        If a draft token leads to an error of the library, nothing is allowed after it, since it may still be rejected.

        Returns:
            uint32 [1 to len(draft) + 1, ceil(vocab_size / 32)].

        Raises:
            ValueError: The grammar exceeds a limit of the library.
        """
        rows = np.empty((len(draft) + 1, (self._tokenizer.vocab_size + 31) // 32), np.int32)
        walker = self.fork() if draft else self
        walker._fill(rows, 0)
        walker._check()  # on an error the library's mask allows the stop tokens, as if the output were complete
        for i, token_id in enumerate(draft):
            if not _allows(rows[i], token_id):
                return rows[: i + 1].view(np.uint32)
            try:
                walker.advance((token_id,))
                walker._fill(rows, i + 1)
                walker._check()
            except ValueError:
                rows[i + 1] = 0
                return rows[: i + 2].view(np.uint32)
        return rows.view(np.uint32)

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Advance over generated tokens. Raises ValueError for a token that the mask forbids."""
        for token_id in token_ids:
            if self._ended:
                return
            if token_id in self._stop_token_ids and self._matcher.is_accepting():
                self._ended = True
            else:
                self._consume(token_id)

    def fork(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._tokenizer, self._ended)

    def _fill(self, rows: np.ndarray, index: int) -> None:
        if self._ended:
            rows[index] = _stop_mask(self._stop_token_ids, rows.shape[1])
        else:
            fill_next_token_bitmask(self._matcher, rows, index)

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"llguidance cannot continue: {first_words(self._matcher.get_error())}")


def _load_tokenizer(
    model_dir: Path, vocab_size: int, stop_token_ids: Sequence[int]
) -> tuple[LLTokenizer, frozenset[str]]:
    """Return llguidance's tokenizer and the strings of the tokens that it takes for control tokens."""
    path = model_dir / "tokenizer.json"
    if not stop_token_ids:
        raise EngineFailed(f"{model_dir}: the model has no stop token, which a grammar needs to end the output")
    try:
        text = path.read_text(encoding="utf-8")
        added = (file := json.loads(text)).get("added_tokens", ())
        with_logits = [token for token in added if token["id"] < vocab_size]
        if len(with_logits) < len(added):  # those of Molmo2's images have none, which llguidance refuses
            text = json.dumps({**file, "added_tokens": with_logits})
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(stop_token_ids))
        special = (token["content"] for token in with_logits if tokenizer.is_special_token(token["id"]))
        return tokenizer, frozenset(special)
    except (OSError, ValueError) as error:
        raise EngineFailed(f"{path}: llguidance cannot read the tokenizer ({first_words(str(error))})") from None


def _source(spec: GrammarSpec, control_strings: frozenset[str], free_limits: FreeLimits | None) -> str:
    """Return llguidance's grammar, which forces no text that may spell a control token.

    Where only one text can follow, llguidance allows the tokens of this text alone, control tokens among them, which it
    then rejects.
    """
    match spec.kind:
        case "json_schema":
            schema = strict_schema(_parsed(spec.text))
            if free_limits is not None:
                schema = free_limits.apply(schema)
            text = json.dumps(with_options(schema))
            rules, forcing = f"start: %json {text}", LLMatcher.grammar_from_json_schema(text)
        case "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(with_options({"type": "object"})))
        case "regex":
            if "[" in spec.text and DIGITS_AT_HYPHEN.search(spec.text):
                # refuse a range such as [+-\d]: with digits spelled out it would be another one
                build_matcher(byte_tokenizer(), partial(LLMatcher.grammar_from_regex, spec.text))
            # digits of other scripts are more than many programs know; in a schema's patterns they are none either
            forcing = LLMatcher.grammar_from_regex(regex_to_lark(spec.text, use_ascii="d"))
            rules = json.loads(forcing)["grammars"][0]["lark_grammar"]
            return f"{NO_FORCING}{rules}" if _can_match(rules, control_strings) else forcing
        case "lark":
            rules, forcing = spec.text.removeprefix(LARK_HEAD), spec.text
    return f"{NO_FORCING}{rules}" if _may_spell(rules, control_strings) else forcing


def _place_of(error: ValueError, spec: GrammarSpec) -> str:
    """Return the reason why a grammar does not compile, with the place in a schema of which it is true."""
    try:
        culprits = find_culprits(strict_schema(_parsed(spec.text))) if spec.kind == "json_schema" else ()
    except (ValueError, RecursionError):
        culprits = ()
    return culprits[0].reason if culprits else str(error)


def _can_match(rules: str, control_strings: frozenset[str]) -> bool:
    """Return whether a grammar of one expression can match a text with a control string in it."""
    if not control_strings:
        return False
    any_control = "|".join(re.escape(text).replace("/", r"\/") for text in sorted(control_strings))
    expression = rules.removeprefix("start: ")
    both = f"start: BOTH\nBOTH: {expression} & /(?s:.*)({any_control})(?s:.*)/\n"
    matcher = LLMatcher(byte_tokenizer(), both, log_level=0, limits=limits())
    if matcher.is_error():  # the expression itself is wrong or too large
        return False
    matcher.compute_bitmask()
    return not matcher.is_error()


def _may_spell(rules: str, control_strings: frozenset[str]) -> bool:
    """Return whether a literal of a grammar contains a control string; an expression may spell any."""
    lines = [line for line in rules.split("\n") if not TERMINAL.match(line)]
    if any('"pattern' in line or "INPUT_" in line for line in lines):
        return bool(control_strings)
    literals = [literal for line in lines for literal in LITERAL.findall(line)]
    escaped = {json.dumps(text, ensure_ascii=ascii)[1:-1] for text in control_strings for ascii in (False, True)}
    return any(text in literal for literal in literals for text in escaped)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not valid JSON ({error})") from None


def _allows(row: np.ndarray, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def _stop_mask(stop_token_ids: frozenset[int], num_words: int) -> np.ndarray:
    mask = np.zeros(num_words, np.uint32)
    for token_id in stop_token_ids:
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return mask.view(np.int32)


def _invalid(spec: GrammarSpec, reason: str) -> InvalidRequest:
    return InvalidRequest(f"`{spec.field}`: {reason}", spec.field)
