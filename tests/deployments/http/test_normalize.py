"""The rules of normalization, as sentences and as properties of random conversations."""

import copy
import itertools
import re
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http.normalize import DEFAULT_VOLATILE_PATTERNS, SystemPolicy, _stable_lines, normalize
from engine.errors import InvalidRequest


def system(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **extra}


def user(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def assistant(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def tool(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **extra}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_a_well_formed_conversation_comes_back_equal():
    conversation = (
        system("You are helpful."),
        user([text("What is this?"), IMAGE]),
        assistant(None, tool_calls=CALLS),
        tool("42", tool_call_id="c1"),
        assistant("A cat.", reasoning_content="It has whiskers."),
        user("Thanks.", name="ann"),
    )
    assert normalize(conversation) == conversation


def test_an_empty_conversation_stays_empty():
    assert normalize([]) == ()


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize(
    ("contents", "joined"),
    [
        (["a", "b", "c"], "a\n\nb\n\nc"),
        ([[text("a")], [IMAGE, text("b")]], [text("a"), IMAGE, text("b")]),
        (["a", [IMAGE]], [text("a"), IMAGE]),
        ([[IMAGE], "a", "b", [text("c")]], [IMAGE, text("a\n\nb\n\nc")]),
        ([[text("S1"), text("S1b")], [text("S2"), text("S2b")]], [text("S1"), text("S1b\n\nS2"), text("S2b")]),
        (["", "a"], "a"),
        (["a", None, [], ""], "a"),
        ([None, [IMAGE]], [IMAGE]),
        (["", ""], ""),
        ([None, None], None),
        ([None, []], []),
    ],
)
def test_consecutive_messages_of_one_role_merge(role, contents, joined):
    assert normalize([{"role": role, "content": content} for content in contents]) == (
        {"role": role, "content": joined},
    )


def test_tool_results_never_merge():
    messages = (tool("1", tool_call_id="c1"), tool("2", tool_call_id="c2"), tool("3", tool_call_id="c2"))
    assert normalize(messages) == messages


@pytest.mark.parametrize(
    "extra",
    [{"tool_calls": CALLS}, {"reasoning_content": "Hm."}],
)
@pytest.mark.parametrize("flip", [False, True])
def test_assistant_messages_with_tool_calls_or_reasoning_stay_apart(extra, flip):
    pair = (assistant("a", **extra), assistant("b"))
    messages = pair[::-1] if flip else pair
    assert normalize(messages) == messages
    assert normalize((pair[0], pair[0])) == (pair[0], pair[0])


def test_empty_fields_do_not_keep_messages_apart():
    echoed = assistant("a", tool_calls=None, refusal=None, annotations=[])
    assert normalize([echoed, assistant("b")]) == ({**echoed, "content": "a\n\nb"},)


def test_messages_with_different_names_stay_apart():
    messages = (user("a", name="ann"), user("b", name="bob"), user("c"))
    assert normalize(messages) == messages


def test_messages_with_the_same_name_merge_and_keep_the_name():
    assert normalize([user("a", name="ann"), user("b", name="ann")]) == (user("a\n\nb", name="ann"),)


def test_messages_with_different_ids_stay_apart():
    messages = (user("a", id=1), user("b", id=2))
    assert normalize(messages) == messages


def test_late_system_messages_move_to_the_front_and_their_neighbours_merge():
    messages = [user("a"), system("one"), user("b"), assistant("c"), system("two"), user("d")]
    assert normalize(messages) == (system("one\n\ntwo"), user("a\n\nb"), assistant("c"), user("d"))


def test_hoisted_parts_follow_the_leading_system_message():
    assert normalize([system("one"), user("a"), system([text("two")])]) == (
        system([text("one\n\ntwo")]),
        user("a"),
    )


def test_named_system_messages_all_stand_in_front_and_keep_their_names():
    messages = [user("a"), system("x", name="example_user"), system("y", name="example_assistant"), system("z")]
    assert normalize(messages) == (
        system("x", name="example_user"),
        system("y", name="example_assistant"),
        system("z"),
        user("a"),
    )


@pytest.mark.parametrize("policy", ["hoist", "inline"])
def test_empty_late_system_message_is_dropped(policy):
    assert normalize([user("a"), system(""), user("b"), system(None)], policy) == (user("a\n\nb"),)


def test_inline_policy_turns_a_late_system_message_into_marked_user_text_in_place():
    messages = [system("one"), user("a"), assistant("b"), system("two"), assistant("c")]
    assert normalize(messages, "inline") == (
        system("one"),
        user("a"),
        assistant("b"),
        user("[system] two"),
        assistant("c"),
    )


def test_inline_policy_marks_content_parts_as_well():
    messages = [assistant("a"), system([text("b"), IMAGE]), assistant("c"), system([IMAGE])]
    assert normalize(messages, "inline") == (
        assistant("a"),
        user([text("[system] b"), IMAGE]),
        assistant("c"),
        user([text("[system] "), IMAGE]),
    )


def test_inlined_system_text_merges_with_the_user_messages_around_it():
    assert normalize([user("a"), system("b"), user("c")], "inline") == (user("a\n\n[system] b\n\nc"),)


def test_error_policy_refuses_a_late_system_message_by_its_path():
    with pytest.raises(InvalidRequest, match="messages") as caught:
        normalize([system("one"), system("two"), user("a"), user("b"), system("late")], "error")
    assert caught.value.field == "messages[4].role"


def test_error_policy_accepts_system_messages_at_the_start():
    assert normalize([system("one"), system("two"), user("a")], "error") == (system("one\n\ntwo"), user("a"))


@pytest.mark.parametrize("policy", get_args(SystemPolicy))
def test_a_template_that_takes_late_system_messages_gets_them_in_order(policy):
    messages = [user("a"), system("b"), system("c"), user("d")]
    kept = normalize(messages, policy, keeps_late_system=True)
    assert kept == (user("a"), system("b\n\nc"), user("d"))


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=81f2"


@pytest.mark.parametrize(
    ("content", "stable"),
    [
        (f"{BILLING}\nYou are helpful.", "You are helpful."),
        (f"You are\n{BILLING.upper()}\r\nhelpful.", "You are\nhelpful."),
        (f"You are helpful.\n{BILLING}", "You are helpful.\n"),
        (BILLING, ""),
        ([text(BILLING), text("You are helpful.")], [text("You are helpful.")]),
        ([text(f"{BILLING}\na"), text("")], [text("a"), text("")]),
        ([{**text(BILLING), "id": 1}], [{**text(""), "id": 1}]),
        (f"It is called {BILLING}", f"It is called {BILLING}"),
        (f"{BILLING};\n \tX-Anthropic-Billing-Header:cch=0 \nYou are helpful.", "You are helpful."),
        (f"{BILLING};You are helpful.", f"{BILLING};You are helpful."),
        (f"{BILLING}; You are helpful, x=3.\nBe brief.", f"{BILLING}; You are helpful, x=3.\nBe brief."),
        ("x-anthropic-billing-header: what Claude Code sends", "x-anthropic-billing-header: what Claude Code sends"),
        ("Today is Monday.\nx-request-id: 5", "Today is Monday.\nx-request-id: 5"),
    ],
)
def test_volatile_lines_are_removed_from_system_messages(content, stable):
    assert normalize([system(content)]) == (system(stable),)


def test_two_requests_that_differ_in_a_volatile_line_become_equal():
    first, second = (
        normalize([user("a"), system(f"x-anthropic-billing-header: cch={i}\nYou are helpful.")]) for i in range(2)
    )
    assert first == second


def test_volatile_lines_of_other_roles_are_kept():
    messages = (user(BILLING), assistant(BILLING), tool(BILLING, tool_call_id="c1"))
    assert normalize(messages) == messages
    assert normalize((user("a"), assistant("b"), user([text(BILLING)])))[-1] == user([text(BILLING)])


def test_volatile_patterns_are_configurable():
    message = system("Now: 12:00\nToday: Monday\nYou are helpful.")
    assert normalize([message], volatile_patterns=[re.compile("^Now:"), re.compile("^today:", re.I)]) == (
        system("You are helpful."),
    )
    assert normalize([system(BILLING)], volatile_patterns=()) == (system(BILLING),)


def line_by_line(content: str, patterns: tuple[Any, ...]) -> str:
    """Apply volatile patterns as they are defined: each line is searched alone, without its line break."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", content)
    return "".join(line for line in lines if not any(re.search(p, line.rstrip("\r\n")) for p in patterns))


LINE_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        *(r"^a", r"b$", r"^$", r"\Aa", r"b\Z"),
        r"(?<!x)b",
        r"a(?!b)",
        r"\s$",
        r"[^a]",
        r"(?s)a.b",
        r"\r",
        r"\n",
        r"\s*b",
    )
]
LINES = st.lists(
    st.sampled_from(["a", "b", "x", " ", "\n", "\r", "\r\n", "\r\r\n", "\u2028", "\x0b", BILLING, BILLING.upper()])
).map("".join)


@given(LINES, st.lists(st.sampled_from([*DEFAULT_VOLATILE_PATTERNS, *LINE_PATTERNS]), max_size=3))
@settings(deadline=None, max_examples=300)
def test_volatile_patterns_match_within_single_lines(content, patterns):
    assert normalize([system(content)], volatile_patterns=patterns) == (system(line_by_line(content, tuple(patterns))),)


@pytest.mark.parametrize("char", ["K", "ſ", "ı", "İ"])
def test_volatile_lines_match_letters_with_special_case_folding(char):
    plain = {"K": "k", "ſ": "s", "ı": "i", "İ": "i"}[char]
    line = BILLING.replace(plain, char) if plain in BILLING else f"{char}{BILLING}"
    assert normalize([system(f"{line}\nkept")]) == (system(line_by_line(f"{line}\nkept", DEFAULT_VOLATILE_PATTERNS)),)


def test_repeated_lines_are_searched_only_once():
    searched: list[str] = []

    class Pattern:
        pattern = "x"

        def search(self, line: str) -> None:
            searched.append(line)

    assert _stable_lines("a\n\nb\n" * 10_000, [Pattern()]) == "a\n\nb\n" * 10_000  # type: ignore[list-item]
    assert sorted(searched) == ["", "a", "b"]


def test_a_long_line_that_is_almost_volatile_costs_linear_time():
    lines = [f"x-anthropic-billing-header: {pair * 300_000}!  x" for pair in ("a=b;", "a=", "a=b; ", " ")]
    for line in lines:
        began = time.process_time()
        assert normalize([system(line)]) == (system(line),)
        assert time.process_time() - began < 2


def test_many_long_messages_merge_in_linear_time():
    (merged,) = normalize([user("x" * 10_000)] * 4096)
    assert len(merged["content"]) == 4096 * 10_002 - 2


TEXTS = st.one_of(st.sampled_from(["", "a", "b\n", "\n", f"{BILLING}\nkept", BILLING]), st.text(max_size=8))
PARTS = st.one_of(
    TEXTS.map(text), st.integers(0, 9).map(lambda i: {"type": "image_url", "image_url": {"url": f"u{i}"}})
)
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["ann", "bob", "", None]),
        "tool_calls": st.sampled_from([CALLS, [], None]),
        "reasoning_content": st.sampled_from(["Hm.", "", None]),
        "id": st.integers(1, 3),
    },
)
MESSAGES = st.builds(
    lambda role, content, extras: {"role": role, **content, **extras},
    st.sampled_from(["system", "user", "user", "assistant", "tool"]),
    st.fixed_dictionaries({"content": st.one_of(st.none(), TEXTS, st.lists(PARTS, max_size=3))}),
    EXTRAS,
)
CONVERSATIONS = st.lists(MESSAGES, max_size=8)
SETTINGS = st.tuples(
    st.sampled_from(["hoist", "inline"]),
    st.sampled_from([(), (re.compile(r"(?i)^x-anthropic-billing-header:"),)]),
    st.booleans(),
)


def pieces(messages: Any) -> list[str]:
    """Everything that a conversation says, apart from lines of it that may go."""
    found = []
    for message in messages:
        content = message.get("content") or []
        for part in [content] if isinstance(content, str) else content:
            part = text(part) if isinstance(part, str) else part
            said = part["text"].replace(BILLING, "") if part["type"] == "text" else str(part["image_url"])
            found += [line.removeprefix("[system] ") for line in said.split("\n")]
        found += [
            f"{k}={v}" for k, v in message.items() if k in ("name", "tool_calls", "reasoning_content", "id") and v
        ]
    return [piece for piece in found if piece.strip()]


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_normalization_is_idempotent(conversation, how):
    once = normalize(conversation, *how)
    assert normalize(once, *how) == once


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_the_input_is_never_mutated(conversation, how):
    before = copy.deepcopy(conversation)
    normalize(conversation, *how)
    assert conversation == before


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_normalization_keeps_the_text_of_every_message(conversation, how):
    after = pieces(normalize(conversation, *how))
    for piece in set(pieces(conversation)):
        assert piece in after


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_media_and_tool_results_stay_in_order(conversation, how):
    def of_others(messages):
        others = [m for m in messages if m["role"] != "system"]
        return [p for m in others for p in pieces([m]) if p.startswith(("{'url'", "tool_calls="))]

    if not any(m["role"] == "system" for m in conversation):
        assert of_others(normalize(conversation, *how)) == of_others(conversation)
    results = [m for m in conversation if m["role"] == "tool"]
    assert len([m for m in normalize(conversation, *how) if m["role"] == "tool"]) == len(results)


def could_merge(first: dict[str, Any], second: dict[str, Any]) -> bool:
    same = all((first.get(key) or None) == (second.get(key) or None) for key in ("role", "name", "id"))
    bound = any(message.get(key) for message in (first, second) for key in ("tool_calls", "reasoning_content"))
    return same and not bound and first["role"] != "tool"


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_adjacent_messages_of_one_role_are_merged(conversation, how):
    for first, second in itertools.pairwise(normalize(conversation, *how)):
        assert not could_merge(first, second)


@given(CONVERSATIONS, SETTINGS)
@settings(deadline=None)
def test_system_messages_precede_all_other_messages(conversation, how):
    policy, patterns, _ = how
    roles = [m["role"] for m in normalize(conversation, policy, patterns)]
    assert roles == sorted(roles, key=lambda role: role != "system")
    assert set(roles) <= {"system", "user", "assistant", "tool"}
