"""Prompts that cannot fit are refused before they are tokenized, and no others."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import ContextLengthExceeded
from engine.processing import prompt_length
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.prompt_length import ClientDisconnected, PromptLimit, TokenBound, count_windows
from engine.processing.tokenizer import ChatTokenizer
from tests.engine.processing.chat_templates import build_sentencepiece
from tests.support.night import some_at_night

DEMO = json.loads((DEMO_MODEL / "tokenizer.json").read_text())


def added(content: str, **how: Any) -> dict[str, Any]:
    plain = {"id": 4200, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {**plain, "content": content, **how}


def edited(**edits: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**DEMO, **edits}))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    pieces = build_sentencepiece(tmp_path_factory.mktemp("pieces"), "plain")
    spaces = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Removed", "invert": False}
    whole_words = {**DEMO["model"], "ignore_merges": True}
    shortening = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    return {
        "demo": edited(),
        "nfc": edited(normalizer={"type": "NFC"}),
        "nfkc": edited(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}]}),
        "lower case": edited(normalizer={"type": "Lowercase"}),
        "shortening": edited(normalizer=shortening),
        "taking spaces": edited(added_tokens=[*DEMO["added_tokens"], added("<mask>", lstrip=True, rstrip=True)]),
        "without spaces": edited(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [spaces, *DEMO["pre_tokenizer"]["pretokenizers"]]}
        ),
        "whole words": edited(model=whole_words),
        "sentencepiece": pieces._tokenizer,
    }


NAMES = [
    *("demo", "nfc", "nfkc", "lower case", "shortening", "taking spaces", "without spaces", "whole words"),
    "sentencepiece",
]
SNIPPETS = [
    *(
        "a",
        "A",
        "e\u0301",
        "\u0301",
        "\u0338",
        "\ufb03",
        "\u1100\u1161",
        "é",
        "ж",
        "🙂",
        "漢字",
        " ",
        "  ",
        "\n",
        "\t",
        " \n ",
    ),
    *("the", " the", "12345", "...", "=====", "<mask>", "<|vision_start|>", "<|im_end|>", "</tool_response>", "\u2003"),
]
TEXTS = st.lists(st.tuples(st.sampled_from(SNIPPETS), st.integers(1, 40)), max_size=12).map(
    lambda runs: "".join(snippet * num for snippet, num in runs)
)


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def bounds(tokenizers: dict[str, Tokenizer]) -> dict[str, TokenBound]:
    return {name: TokenBound(tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(TEXTS, st.text(alphabet=st.characters(exclude_categories=["Cs"]))))
def test_lower_bound_from_bytes_never_exceeds_the_number_of_tokens(
    tokenizers: dict[str, Tokenizer], bounds: dict[str, TokenBound], name: str, text: str
):
    assert bounds[name].of(text) <= num_tokens(tokenizers[name], text)


def test_the_bound_is_tight_for_a_text_of_longest_tokens(tokenizers: dict[str, Tokenizer]):
    bound = TokenBound(tokenizers["demo"])
    assert bound.of("<|vision_start|>" * 1000) > 900
    assert bound.of("") == 0
    assert TokenBound(tokenizers["nfc"]).of("word " * 1000) > 300
    assert TokenBound(tokenizers["lower case"]).of("word " * 1000) == 0, "unknown rules are trusted with nothing"


def passages(rng: random.Random) -> str:
    """About three windows of text, with runs that reach over the ends of windows."""
    runs = [rng.choice(SNIPPETS) * rng.choice((1, 2, 7, 100, 3000)) for _ in range(400)]
    return "".join(runs)[: 3 * prompt_length.WINDOW_CHARS]


@pytest.mark.parametrize("name", ["demo", "nfkc", "without spaces", "sentencepiece"])
@pytest.mark.parametrize("seed", some_at_night(range(2), [0], "another text of the same kind"))
def test_window_counts_never_exceed_the_number_of_tokens(tokenizers: dict[str, Tokenizer], name: str, seed: int):
    text = passages(random.Random(seed))
    counts = list(count_windows(tokenizers[name], text))
    assert len(counts) >= 2 and counts == sorted(counts)
    assert counts[-1] <= num_tokens(tokenizers[name], text)


@pytest.mark.parametrize("unit", ["word tree 12 apple ", "a", " \n", "x-y_z\t", "e\u0301", "0"])
@pytest.mark.parametrize(
    "name",
    some_at_night(
        ["demo", "nfc", "sentencepiece"], ["nfc", "sentencepiece"], "without a normalizer there is less to do"
    ),
)
def test_windows_count_nearly_all_of_a_text(tokenizers: dict[str, Tokenizer], name: str, unit: str):
    text = (unit * 200_000)[:200_000]
    exact = num_tokens(tokenizers[name], text)
    *_, counted = count_windows(tokenizers[name], text)
    assert 0.7 * exact < counted <= exact


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO_MODEL)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def refusal(make: Callable[..., Any], text: str, limit: PromptLimit) -> ContextLengthExceeded:
    with pytest.raises(ContextLengthExceeded) as caught:
        make(user(text), template_kwargs={}, limit=limit)
    return caught.value


@pytest.mark.parametrize("unit", ["word tree ", "\n", "a", "<|im_end|>", "<|im_end|>a", "ж", " \n"])
def test_a_prompt_far_beyond_the_limit_is_refused_after_tokenizing_a_small_part(tokenizer, unit, monkeypatch):
    num_encoded = 0

    def counting(method):
        def counted(texts, **how):
            nonlocal num_encoded
            num_encoded += sum(map(len, texts))
            return method(texts, **how)

        return counted

    class Counting:
        encode_batch = staticmethod(counting(tokenizer._tokenizer.encode_batch))
        encode_batch_fast = staticmethod(counting(tokenizer._tokenizer.encode_batch_fast))
        encode = staticmethod(tokenizer._tokenizer.encode)

    monkeypatch.setattr(tokenizer, "_tokenizer", Counting())
    text = f"Q{unit * (2**21 // len(unit))}Q"
    error = refusal(tokenizer.chat_prompt, text, PromptLimit(8192))
    assert "needs at least" in error.message and "at least 1 " not in error.message
    assert error.field == "messages"
    assert num_encoded < 2**19


def test_a_prompt_that_is_counted_completely_is_refused_with_its_exact_length(tokenizer: ChatTokenizer):
    num = len(tokenizer.encode_chat(user("apple " * 300), template_kwargs={}))
    error = refusal(tokenizer.encode_chat, "apple " * 300, PromptLimit(num))
    assert error.args == (num, 1, num, False)
    fits = tokenizer.encode_chat(user("apple " * 300), template_kwargs={}, limit=PromptLimit(num + 1))
    assert len(fits) == num


def test_tokens_of_images_count_towards_the_limit(tokenizer: ChatTokenizer):
    error = refusal(tokenizer.encode_chat, "apple", PromptLimit(1000, num_image_tokens=990))
    assert error.args[0] > 1000


@settings(max_examples=40, deadline=None)
@given(text=TEXTS, max_context_tokens=st.integers(40, 400))
def test_prompts_within_the_limit_are_accepted_and_longer_ones_refused(text: str, max_context_tokens: int):
    messages = user(f"Q{text}Q")
    ids = CHAT.chat_prompt(messages, template_kwargs={}).token_ids
    limit = PromptLimit(max_context_tokens)
    if len(ids) < max_context_tokens:
        assert CHAT.chat_prompt(messages, template_kwargs={}, limit=limit).token_ids.tolist() == ids.tolist()
    else:
        error = refusal(CHAT.chat_prompt, f"Q{text}Q", limit)
        assert max_context_tokens <= error.args[0] <= len(ids)


CHAT = ChatTokenizer(DEMO_MODEL)


def test_text_that_the_template_drops_does_not_count(tokenizer: ChatTokenizer):
    """Old thoughts never reach the prompt: a bound on the text of the messages would refuse this conversation."""
    said = {"role": "assistant", "content": f"<think>\n{'hm ' * 200_000}\n</think>\n\nYes."}
    messages = [*user("Hi"), said, *user("And?")]
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, limit=PromptLimit(100))
    assert len(prompt.token_ids) < 100


@pytest.mark.parametrize("text", ["a " * 2**19, "<|im_end|>" * 2000])
def test_tokenization_stops_when_the_client_has_disconnected(tokenizer: ChatTokenizer, text: str):
    asked = []

    def is_wanted() -> bool:
        asked.append(1)
        return False

    with pytest.raises(ClientDisconnected):
        tokenizer.chat_prompt(user(text), template_kwargs={}, limit=PromptLimit(10**6, is_wanted=is_wanted))
    assert len(asked) == 1


def test_a_large_text_lets_other_threads_run(tokenizer: ChatTokenizer, tmp_path: Path):
    """As one call that keeps the interpreter's lock it would hold up all that a planner does."""
    import threading
    import time

    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode_text("word tree 12 apple " * 60_000)
    took = time.perf_counter() - began
    over.set()
    thread.join()
    assert sum(began < at < began + took for at in ticks) > 10
