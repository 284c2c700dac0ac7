"""Prompts are cut where the next one may go on otherwise: as properties of random conversations, and place by place."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.processing.boundaries import RenderedPrompt, num_common
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.control_tokens import ControlTokens
from engine.processing.tokenizer import ChatPrompt, ChatTokenizer
from tests.engine.processing.chat_templates import TEMPLATES, build_sentencepiece, build_tokenizer
from tests.support.image_files import placeholders

Message = dict[str, Any]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
LONG = "You answer questions about trees, one after the other, in as few words as you can, and never in verse."
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "calendar")]
PICTURE = {"type": "image"}
NO_TOOL_MESSAGES = ("gemma", "gemma pieces")
STRIPS_THOUGHTS = ("demo", "qwen3")
"""Templates that remove the thoughts of assistant messages after the last question once there is another question."""

models = pytest.mark.parametrize("name", ["demo", *TEMPLATES, "gemma pieces", "plain pieces"])
families = pytest.mark.parametrize("name", ["demo", *TEMPLATES])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    base: Path = tmp_path_factory.mktemp("models")
    built = {name: build_tokenizer(base / name, name) for name in TEMPLATES}
    pieces = {f"{name} pieces": build_sentencepiece(base / f"{name} pieces", name) for name in ("gemma", "plain")}
    return {"demo": ChatTokenizer(DEMO_MODEL), **built, **pieces}


def message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def calling(reasoning: str | None = None) -> Message:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    return message("assistant", None, tool_calls=[call], **({"reasoning_content": reasoning} if reasoning else {}))


def prompt(tokenizer: ChatTokenizer, messages: Sequence[Message], image_tokens: Any = (), **kwargs: Any) -> ChatPrompt:
    return tokenizer.chat_prompt(messages, template_kwargs=kwargs, placeholders=placeholders(*image_tokens))


def places(found: ChatPrompt) -> dict[str, int]:
    return {boundary.kind: boundary.num_tokens for boundary in found.boundaries}


def prefix(found: ChatPrompt, kind: str) -> list[int]:
    return found.token_ids[: places(found)[kind]].tolist()


def split(tokenizer: ChatTokenizer, found: ChatPrompt, kind: str) -> tuple[str, str]:
    """Text in front of a boundary and behind it."""
    ids = found.token_ids.tolist()
    sides = ids[: places(found)[kind]], ids[places(found)[kind] :]
    front, behind = (b"".join(map(tokenizer.token_bytes, side)).decode() for side in sides)
    return front, behind


# --- random conversations ------------------------------------------------------------------------------------------

SNIPPETS = (
    *(
        "Alpha",
        "Bravo",
        "A",
        "B",
        "hello",
        " the",
        "7",
        ".",
        ":",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "🙂",
        "Q0Q",
        "</think>",
    ),
    *("<|im_start|>user\n", "<|im_end|>", "<|image_pad|>", "<think>", "[INST]", "<end_of_turn>", "User:", "Assistant:"),
)
texts = st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=5).map("".join)
systems = st.one_of(st.none(), texts, texts.map(lambda text: LONG + text))
thoughts = st.one_of(st.none(), st.sampled_from(["hm", "so\n\nit is", "Alpha"]))


@st.composite
def conversations(draw: st.DrawFn, with_tools: bool) -> list[Message]:
    """Ends with a user's message or a tool's result."""
    system = draw(systems)
    messages = [] if system is None else [message("system", system)]
    for _ in range(draw(st.integers(0, 2))):
        messages += [message("user", draw(texts)), *(draw(loops) if with_tools else []), draw(answers)]
    return [*messages, message("user", draw(texts)), *(draw(loops) if with_tools else [])]


answers = st.builds(lambda text, thought: message("assistant", text, reasoning_content=thought), texts, thoughts)
results = texts.map(lambda text: message("tool", text, tool_call_id="c1"))
loops = st.lists(st.tuples(thoughts.map(calling), results), max_size=2).map(lambda pairs: [*itertools.chain(*pairs)])
thinking = st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}])


def next_turns(name: str, messages: list[Message], data: st.DataObject) -> list[list[Message]]:
    """Return conversations that may follow this one. A question behind a loop whose thoughts it takes away changes the
    loop itself: that prompt goes on from the boundary in front of the loop."""
    more = [] if name in NO_TOOL_MESSAGES else [[data.draw(thoughts.map(calling)), data.draw(results)]]
    asked = next(i for i in reversed(range(len(messages))) if messages[i]["role"] == "user")
    thought = any(m.get("reasoning_content") for m in messages[asked:])
    if thought and name in STRIPS_THOUGHTS:
        return more
    return [*more, [data.draw(answers), message("user", data.draw(texts))]]


@models
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_turn_boundary_ends_a_prefix_of_the_next_turns_prompt(
    tokenizers: dict[str, ChatTokenizer], name: str, data: st.DataObject
):
    messages = data.draw(conversations(name not in NO_TOOL_MESSAGES))
    kwargs = data.draw(thinking) | data.draw(st.sampled_from([{}, {"tools": TOOLS}]))
    found = prompt(tokenizers[name], messages, **kwargs)
    if "turn" not in places(found):
        assert name == "mistral"  # without generation prompt, tool results are the end of the prompt
        return
    for more in next_turns(name, messages, data):
        ids = tokenizers[name].encode_chat([*messages, *more], template_kwargs=kwargs).tolist()
        assert ids[: places(found)["turn"]] == prefix(found, "turn")


@models
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_system_boundary_does_not_depend_on_the_user_messages(
    tokenizers: dict[str, ChatTokenizer], name: str, data: st.DataObject
):
    system = data.draw(st.sampled_from([[], [message("system", data.draw(texts) + LONG + data.draw(texts))]]))
    kwargs = data.draw(thinking) | data.draw(st.sampled_from([{}, {"tools": TOOLS}]))
    said = [data.draw(texts) for _ in range(3)]
    found = [prompt(tokenizers[name], [*system, message("user", text)], **kwargs) for text in said]
    parts = {tuple(prefix(one, "system")) if "system" in places(one) else () for one in found}
    assert len(parts) == 1 and (parts != {()} or not system)


@models
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_boundaries_rise_within_the_prompt_and_token_ids_equal_those_of_encode_chat(
    tokenizers: dict[str, ChatTokenizer], name: str, data: st.DataObject
):
    messages = data.draw(conversations(name not in NO_TOOL_MESSAGES))
    found = prompt(tokenizers[name], messages)
    at = [boundary.num_tokens for boundary in found.boundaries]
    assert at == sorted(set(at)) and all(0 < n < len(found.token_ids) for n in at)
    assert len(places(found)) == len(at)
    assert found.token_ids.dtype == np.int32
    assert found.token_ids.tolist() == tokenizers[name].encode_chat(messages, template_kwargs={}).tolist()


# --- place by place ------------------------------------------------------------------------------------------------

ENDS = {
    "demo": ("<|im_end|>\n<|im_start|>", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "chatml": ("<|im_end|>\n<|im_start|>", "<|im_start|>assistant\n"),
    "qwen3": ("<|im_end|>\n<|im_start|>", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "llama3": (
        "<|eot_id|><|start_header_id|>user<|end_header_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "deepseek": ("<｜User｜>", "<｜Assistant｜><think>\n"),
    "gemma": ("", "<start_of_turn>model\n"),
    "plain": ("\n\nUser:", "\n\nAssistant:"),
    "sealed": ("<|im_end|>\n<|im_start|>", "<|im_start|>assistant\n"),
    "mistral": ("", " " + LONG + "\n\nHi[/INST]"),
}


@families
def test_the_system_part_ends_where_the_user_begins_and_the_turn_where_the_answer_does(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    found = prompt(tokenizers[name], [message("system", LONG), message("user", "Hi")])
    system, turn = split(tokenizers[name], found, "system")[0], split(tokenizers[name], found, "turn")[1]
    assert (system.partition(LONG)[1:], turn) == ((LONG, ENDS[name][0]), ENDS[name][1])


def test_a_thinking_answer_begins_behind_the_turn(tokenizers: dict[str, ChatTokenizer]):
    found = prompt(tokenizers["demo"], [message("user", "Hi")], enable_thinking=True)
    assert split(tokenizers["demo"], found, "turn")[1] == "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("last", ["assistant", "tool", "system"])
def test_a_conversation_may_end_with_a_message_of_any_role(tokenizers: dict[str, ChatTokenizer], last: str):
    found = prompt(tokenizers["chatml"], [message("user", "Hi"), message(last, "so")])
    assert split(tokenizers["chatml"], found, "turn")[1] == "<|im_start|>assistant\n"


def test_what_a_template_writes_by_itself_is_the_system_part_without_a_system_message(tmp_path: Path):
    default = "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\n" + LONG + "<|im_end|>\\n' }}{% endif %}"
    tokenizer = build_tokenizer(tmp_path, "", chat_template=default + TEMPLATES["chatml"])
    found = prompt(tokenizer, [message("user", "Hi")])
    assert split(tokenizer, found, "system")[0] == f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>"
    assert split(tokenizer, found, "turn")[1] == "<|im_start|>assistant\n"


def test_without_anything_in_front_the_system_part_is_at_most_what_begins_each_message(
    tokenizers: dict[str, ChatTokenizer],
):
    for kwargs in ({}, {"tools": []}):
        found = prompt(tokenizers["demo"], [message("user", "Hi")], **kwargs)
        assert split(tokenizers["demo"], found, "system")[0] == "<|im_start|>"


def test_the_tools_alone_are_the_system_part_without_a_system_message(tokenizers: dict[str, ChatTokenizer]):
    messages = [message("user", "Hi")]
    front, _ = split(tokenizers["demo"], prompt(tokenizers["demo"], messages, tools=TOOLS), "system")
    assert '"weather"' in front and '"calendar"' in front and front.endswith("<|im_end|>\n<|im_start|>")


def test_other_tools_are_another_system_part(tokenizers: dict[str, ChatTokenizer]):
    messages = [message("system", LONG), message("user", "Hi")]
    found = [prompt(tokenizers["demo"], messages, tools=TOOLS[:n]) for n in (0, 1, 2)]
    assert len({tuple(prefix(one, "system")) for one in found}) == 3


def test_leading_system_messages_form_the_system_part(tokenizers: dict[str, ChatTokenizer]):
    messages = [message("system", "one"), message("system", "two"), message("user", "Hi"), message("system", "three")]
    front, _ = split(tokenizers["chatml"], prompt(tokenizers["chatml"], messages), "system")
    assert "two" in front and "three" not in front


@families
@pytest.mark.parametrize(
    "trick", ["<|im_start|>user\n", "<|im_end|>", "<｜User｜>", "[INST]", "<start_of_turn>", "\nUser:"]
)
def test_control_strings_in_the_system_text_do_not_move_its_end(
    tokenizers: dict[str, ChatTokenizer], name: str, trick: str
):
    def around(text: str) -> str:
        found = prompt(tokenizers[name], [message("system", f"{LONG} {text} {LONG}"), message("user", "Hi")])
        return split(tokenizers[name], found, "system")[0]

    assert around(trick) == around("X").replace(" X ", f" {trick} ")


def test_user_text_like_the_probes_does_not_move_the_system_boundary(tokenizers: dict[str, ChatTokenizer]):
    said = [
        "Alpha",
        "Bravo",
        "AlphaBravo",
        "Al",
        "zzz",
        " Alpha",
        [PICTURE],
        [{"type": "text", "text": "Bravo"}, PICTURE],
    ]
    found = [
        prompt(
            tokenizers["chatml"],
            [message("system", LONG), message("user", content)],
            image_tokens=[3] * (not isinstance(content, str)),
        )
        for content in said
    ]
    assert len({tuple(prefix(one, "system")) for one in found}) == 1


def test_boundary_positions_count_the_placeholders_of_images(tokenizers: dict[str, ChatTokenizer]):
    content = [PICTURE, {"type": "text", "text": "and"}, PICTURE]
    seen = message("user", content)
    for messages in ([message("system", LONG), seen], [seen]):
        small, large = (prompt(tokenizers["demo"], messages, image_tokens=sizes) for sizes in ([1, 1], [7, 90]))
        assert [*places(small)] == [*places(large)] == ["system", "turn"]
        assert places(large)["turn"] == places(small)["turn"] + 6 + 89
        assert places(large)["system"] == places(small)["system"]
        assert split(tokenizers["demo"], large, "turn")[1] == ENDS["demo"][1]


def test_an_image_in_the_system_message_belongs_to_the_system_part(tokenizers: dict[str, ChatTokenizer]):
    messages = [message("system", [PICTURE]), message("user", "Hi")]
    found = prompt(tokenizers["chatml"], messages, image_tokens=[50])
    front, _ = split(tokenizers["chatml"], found, "system")
    assert front.count("<|image_pad|>") == 50 and front.endswith("<|vision_end|><|im_end|>\n<|im_start|>")


def test_the_boundary_before_a_tool_loop_survives_the_removal_of_its_thoughts(
    tokenizers: dict[str, ChatTokenizer],
):
    tokenizer, asked = tokenizers["demo"], [message("user", "Weather?")]
    loop = [*asked, calling("I must look."), message("tool", "rain")]
    later = [*loop, message("assistant", "Rain."), message("user", "Thanks")]
    before, during = prompt(tokenizer, asked), prompt(tokenizer, loop)
    ids = tokenizer.encode_chat(later, template_kwargs={}).tolist()
    assert ids[: places(before)["turn"]] == prefix(before, "turn")
    assert ids[: places(during)["turn"]] != prefix(during, "turn")
    assert split(tokenizer, during, "turn")[1] == ENDS["demo"][1]


# --- templates and tokenizers of other habits ----------------------------------------------------------------------

REFUSE = "{{%- if {} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"


@pytest.mark.parametrize(
    ("refused", "kinds"),
    [
        ("messages[-1].content in ('Alpha', 'Bravo')", {"turn"}),
        ("messages | selectattr('role', 'eq', 'user') | list | length > 1", {"system", "turn"}),
        ("not add_generation_prompt", {"system"}),
    ],
)
def test_a_rendering_that_the_template_refuses_costs_its_boundary_alone(tmp_path: Path, refused: str, kinds: set[str]):
    tokenizer = build_tokenizer(tmp_path, "", chat_template=REFUSE.format(refused) + TEMPLATES["chatml"])
    found = prompt(tokenizer, [message("system", LONG), message("user", "Hi")])
    assert set(places(found)) == kinds
    assert "turn" not in kinds or split(tokenizer, found, "turn")[1] == "<|im_start|>assistant\n"


def test_a_template_that_shows_no_user_text_has_no_system_boundary(tmp_path: Path):
    template = "{%- for m in messages %}{{ '<|im_start|>' + m.role }}{% endfor %}"
    tokenizer = build_tokenizer(tmp_path, "", chat_template=template)
    assert "system" not in places(prompt(tokenizer, [message("system", LONG), message("user", "Hi")]))


def test_the_turn_boundary_is_behind_the_last_message_if_the_generation_prompt_is_empty(tmp_path: Path):
    template = TEMPLATES["chatml"].partition("{%- if add_generation_prompt")[0]
    tokenizer = build_tokenizer(tmp_path, "", chat_template=template)
    found = prompt(tokenizer, [message("user", "Hi")])
    assert split(tokenizer, found, "turn")[0] == "<|im_start|>user\nHi<|im_end|>"


def test_a_long_system_part_inside_the_first_question_is_kept_whole(tokenizers: dict[str, ChatTokenizer]):
    """No control token ends it, so its own tokens do, all but the last."""
    for name in ("gemma", "gemma pieces", "mistral"):
        found = prompt(tokenizers[name], [message("system", LONG * 9), message("user", "\nHi")])
        assert LONG * 9 in split(tokenizers[name], found, "system")[0]


def test_a_place_that_ends_both_system_part_and_turn_is_a_system_boundary(tokenizers: dict[str, ChatTokenizer]):
    found = prompt(tokenizers["deepseek"], [message("system", LONG)])
    assert [*places(found)] == ["system"]
    assert split(tokenizers["deepseek"], found, "system")[1] == "<｜Assistant｜><think>\n"


def test_a_tokenizer_that_misses_its_control_strings_has_boundaries_by_its_tokens(tmp_path: Path):
    added = [
        {"id": i, "content": token, "single_word": i < 3, "special": True, "normalized": False}
        | {"lstrip": False, "rstrip": False}
        for i, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"))
    ]
    tokenizer = build_tokenizer(tmp_path, "chatml", added_tokens=added)
    messages = [message("system", LONG), message("user", "Hi")]
    found = prompt(tokenizer, messages)
    assert found.token_ids.tolist().count(2) < 2  # behind a letter or a digit it is text
    front, behind = split(tokenizer, found, "turn")
    assert front.endswith("Hi<|im_end|>") and behind == "\n<|im_start|>assistant\n"
    more = [*messages, message("assistant", "Yes"), message("user", "And?")]
    assert tokenizer.encode_chat(more, template_kwargs={})[: places(found)["turn"]].tolist() == prefix(found, "turn")


def test_text_between_control_tokens_is_not_tokenised_again(tokenizers: dict[str, ChatTokenizer]):
    def encode(text: str) -> np.ndarray:
        raise AssertionError(f"tokenised again: {text!r}")

    tokenizer = tokenizers["chatml"]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rendered = RenderedPrompt(text, tokenizer.encode_text(text), ControlTokens(TOKENIZER), encode)
    ids = rendered.token_ids.tolist()
    assert rendered.cut([text[: text.rindex("<")]]) == len(ids) - ids[::-1].index(1) - 1
    assert rendered.cut(["<|im_start|>user\nHo"]) == 1
    assert rendered.cut(["<|im_start|>user\nHi<|im_end|>\nmore"]) == ids.index(2) + 1
    assert rendered.cut([text, "<|im_end|>"]) == 0


def test_texts_that_are_escaped_without_being_tokens_have_no_place_among_the_tokens(
    tokenizers: dict[str, ChatTokenizer],
):
    text = "<|im_start|>user\nA [IMG] here<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizers["chatml"].encode_text(text)
    control = ControlTokens(TOKENIZER, texts=["[IMG]", "<|im_end|>"])
    assert control.every.findall(text) == ["<|im_start|>", "[IMG]", "<|im_end|>", "<|im_start|>"]
    rendered = RenderedPrompt(text, ids, control, lambda piece: np.zeros(0, np.int32))
    assert rendered.cut([text[: text.rindex("<")]]) == np.flatnonzero(ids == 1)[-1]


def test_tokens_that_span_a_cut_in_text_are_excluded():
    def rendered(*token_ids: int) -> RenderedPrompt:
        return RenderedPrompt(
            "one two three", np.array(token_ids), ControlTokens(TOKENIZER), lambda text: np.arange(1, 4)
        )

    assert rendered(1, 2, 3, 4, 5).cut(["one two", "one two four"]) == 2
    assert rendered(1, 2, 9, 8, 7).cut(["one two", "one two four"]) == 2
    assert rendered(1, 9, 8, 7, 6).cut(["one two", "one two four"]) == 1


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_length_of_a_common_prefix_is_exact(left: str, right: str):
    expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    assert num_common(left, right) == expected
