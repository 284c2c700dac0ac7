"""Tokens to text: whole characters only, and never anything of or behind a stop string; and the bytes of each."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.detokenizer import Detokenizer, TokenBytes

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
IM_END, THINK = 2, 8

texts = st.text(alphabet=st.sampled_from("ab n.,\n\té日本語한🙂🇩🇪👨‍👩‍👧ß"), max_size=40)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


def run(chunks: list[list[int]], stop: tuple[str, ...] = ()) -> tuple[str, Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = [detokenizer.push(chunk) for chunk in chunks]
    assert "\ufffd" not in "".join(pieces)
    return "".join(pieces) + detokenizer.finish(), detokenizer


def run_unchecked(ids: list[int]) -> tuple[str, Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER)
    return detokenizer.push(ids) + detokenizer.finish(), detokenizer


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """The definition: what stands before the stop string that is complete first, the longest of those."""
    ends = [(end, -len(s)) for s in stop for end in range(len(text) + 1) if text[:end].endswith(s)]
    end, length = min(ends, default=(len(text), 0))
    return text[: end + length]


@settings(deadline=None)
@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=6))
def test_detokenized_pieces_add_up_to_the_text_of_decoding_at_once(text: str, cuts: list[int]):
    out, detokenizer = run(split(encode(text), cuts))
    assert out == text
    assert detokenizer.num_tokens == len(encode(text))


@settings(deadline=None)
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 100), max_size=6),
    stop=st.lists(st.text(alphabet="ab n日🙂", min_size=1, max_size=4), max_size=3),
)
@example(text="xabcd", cuts=[1, 2, 3, 4], stop=["abcd", "bc"])
@example(text="aab", cuts=[1, 2], stop=["ab"])
def test_text_ends_before_the_first_stop_string_for_any_split(text: str, cuts: list[int], stop: list[str]):
    out, detokenizer = run(split(encode(text), cuts), tuple(stop))
    assert out == before_stop(text, tuple(stop))
    assert detokenizer.stopped == any(s in text for s in stop)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 4200), max_size=30), cuts=st.lists(st.integers(0, 100), max_size=6))
def test_arbitrary_tokens_give_the_text_of_decoding_them_at_once(ids: list[int], cuts: list[int]):
    detokenizer = Detokenizer(TOKENIZER)
    out = "".join(detokenizer.push(chunk) for chunk in split(ids, cuts)) + detokenizer.finish()
    assert out.rstrip("\ufffd") == TOKENIZER.decode(ids).rstrip("\ufffd")


def test_incomplete_characters_are_never_delivered():
    ids = encode("🙂")
    assert len(ids) > 1
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([id_]) for id_ in ids] == [""] * (len(ids) - 1) + ["🙂"]
    unfinished = Detokenizer(TOKENIZER)
    assert unfinished.push(encode("ok ") + ids[:-1]) + unfinished.finish() == "ok "


def test_a_long_run_of_broken_bytes_becomes_replacement_characters():
    """Else every further one would cost more than the one before."""
    broken = encode("🙂")[1]
    out, detokenizer = run_unchecked([broken] * 1000 + encode("ok"))
    assert out == "\ufffd" * 1000 + "ok"
    assert detokenizer.num_tokens == 1000 + len(encode("ok"))


def test_special_tokens_are_no_text_but_markup_is():
    assert run([[*encode("a"), IM_END, THINK, *encode("b")]])[0] == "a<think>b"


def test_ids_outside_the_vocabulary_are_no_text():
    out, detokenizer = run([[*encode("a"), 4096, 250_000, *encode("b")]])
    assert out == "ab"
    assert detokenizer.num_tokens == 4


def test_text_that_may_begin_a_stop_string_is_withheld_until_decided():
    detokenizer = Detokenizer(TOKENIZER, ("END",))
    assert detokenizer.push(encode("the E")) == "the "
    assert detokenizer.push(encode("N")) == ""
    assert detokenizer.push(encode("ough")) == "ENough"
    assert detokenizer.push(encode(" EN")) == " "
    assert detokenizer.finish() == "EN"
    assert not detokenizer.stopped


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stop_string_ends_the_text_and_the_count(chunked: bool):
    ids = encode("one STOP two")
    num_until_stop = next(n for n in range(len(ids)) if "STOP" in TOKENIZER.decode(ids[:n]))
    out, detokenizer = run([[id_] for id_ in ids] if chunked else [ids], ("STOP",))
    assert (out, detokenizer.stopped, detokenizer.num_tokens) == ("one ", True, num_until_stop)
    assert detokenizer.push(encode("more")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == num_until_stop


def test_a_stop_string_that_is_contained_in_another_wins_when_it_is_complete_first():
    assert run([encode("x abcd")], ("abcd", "bc"))[0] == "x a"
    assert run([encode("x abc")], ("abc", "bc"))[0] == "x "


def test_an_empty_stop_string_does_not_stop_the_text():
    out, detokenizer = run([encode("text")], ("",))
    assert out == "text" and not detokenizer.stopped


def test_a_byte_level_tokenizer_has_a_token_for_every_byte():
    token_bytes = TokenBytes(TOKENIZER)
    vocabulary = {token_bytes(id_) for id_ in range(TOKENIZER.get_vocab_size())}
    assert {bytes([byte]) for byte in range(256)} <= vocabulary


@settings(deadline=None)
@given(text=texts | st.text(max_size=20))
@example(text="<|vision_start|>")
def test_the_bytes_of_the_tokens_are_those_of_the_text(text: str):
    token_bytes = TokenBytes(TOKENIZER)
    assert b"".join(map(token_bytes, encode(text))).decode() == TOKENIZER.decode(
        encode(text), skip_special_tokens=False
    )


def test_special_tokens_have_bytes_and_padding_has_none():
    token_bytes = TokenBytes(TOKENIZER)
    assert [token_bytes(id_) for id_ in (IM_END, THINK, 4096, 250_000)] == [b"<|im_end|>", b"<think>", b"", b""]


@pytest.mark.parametrize("decoder", [None, "sentencepiece"])
def test_tokens_of_a_tokenizer_that_is_not_byte_level_have_the_bytes_of_their_text(decoder: str | None):
    vocabulary = {"▁the": 0, "re": 1, "<0xE2>": 2, "日Ġ": 3, "<0xE2>x": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if decoder:
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(id_) for id_ in range(5)] == [b" the", b"re", b"\xe2", "日Ġ".encode(), b"<0xE2>x"]


def test_a_byte_level_decoder_may_be_one_of_several_steps():
    tokenizer = Tokenizer(models.BPE(vocab={"ĠÃ©": 0, "日": 1}, merges=[]))
    steps: list[Any] = [decoders.Replace("~", "-"), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(steps)
    assert [TokenBytes(tokenizer)(id_) for id_ in (0, 1)] == [" é".encode(), "日".encode()]
