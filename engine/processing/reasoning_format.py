"""ReasoningFormat: the markup of a model's thoughts, detected from the output of its chat template."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RenderTemplate = Callable[..., str | None]
Encode = Callable[[str], tuple[int, ...]]

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<longcat_think>", "</longcat_think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Markers around thoughts: those of mlx_lm.tokenizer_utils, and two more."""

SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn thinking on and off."""

HISTORY_KEYS = ("reasoning_content", "reasoning", "thinking")

FINAL = "<|channel|>final<|message|>"
HARMONY_NOISE = (
    *(f"<|start|>assistant{FINAL}", FINAL, "<|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    *("<|channel|>final <|constrain|>json<|message|>", "<|start|>assistant<|channel|>commentary<|message|>"),
    *("<|channel|>commentary<|message|>", "<|return|>", "<|end|>"),
)

ASKED = {"role": "user", "content": "Uprobe"}


@dataclass(frozen=True)
class ReasoningFormat:
    """The markup of a model's thoughts."""

    start: str
    """Marker at the start of a thought."""
    end: str
    """Marker at the end of a thought."""
    end_id: int | None
    """Token of `end`; None if it has several tokens."""
    opening_ids: tuple[int, ...]
    """Tokens with which the model starts a thought; () if the prompt already ends with them."""
    closing_ids: tuple[int, ...]
    """Tokens that the template writes between a thought and the answer."""
    switch: str | None
    """Template variable that turns thinking on and off; None: there is none."""
    always: bool = False
    """Whether the model thinks before every answer, however the prompt is rendered."""
    starts: tuple[str, ...] = ()
    """Alternative start markers."""
    noise: tuple[str, ...] = ()
    """Other markup around thoughts and answers, which is dropped."""
    history_key: str | None = None
    """Key of the thought in an earlier message; None: the template drops such thoughts."""
    takes_effort: bool = False
    """Whether the template has a variable `reasoning_effort`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker of thoughts and answers."""
        return (self.start, self.end, *self.starts, *self.noise)

    def template_kwargs(self, is_on: bool) -> dict[str, Any]:
        """Return the template variables that turn thinking on or off."""
        return {} if self.switch is None else {self.switch: is_on}


def find_reasoning_format(render: RenderTemplate, encode: Encode) -> ReasoningFormat | None:
    """Detect the markup of thoughts; return None if the template does not support thinking.

    Args:
        render: Renders messages with template variables as keywords; returns None if the template refuses them.
        encode: Encodes text from the middle of a rendered prompt.
    """
    prompts = {
        (switch, is_on): render([ASKED], add_generation_prompt=True, **{switch: is_on}) or ""
        for switch in SWITCHES
        for is_on in (True, False)
    }
    switch = next((name for name in SWITCHES if prompts[name, True] != prompts[name, False]), None)
    prompt = prompts[switch or SWITCHES[0], True]
    takes_effort = _takes_effort(render)
    if "<|start|>assistant" in prompt and len(encode("<|channel|>")) == len(encode("<|message|>")) == 1:
        return _harmony(render, encode, takes_effort)
    off = prompts[switch or SWITCHES[0], False].partition("Uprobe")[2]
    history_key, shown = _rendered_thought(render)
    for start, end in MARKERS:
        tail = prompt.partition("Uprobe")[2]
        opens = start in tail and end not in tail.rpartition(start)[2]
        if not (opens or (switch and start in off) or start in shown):
            continue
        gap = _opening_gap(shown or off, start)
        unused = off.partition(start + gap)[2]
        closing = next((text for text in (_closing(shown, end), _closing(unused, end)) if text), f"\n{end}\n\n")
        end_ids = encode(end)
        opening = () if opens else encode(start + gap)
        return ReasoningFormat(
            start,
            end,
            end_ids[0] if len(end_ids) == 1 else None,
            opening,
            encode(closing),
            switch,
            always=opens and switch is None,
            history_key=history_key if start in shown else None,
            takes_effort=takes_effort,
        )
    return None


def _harmony(render: RenderTemplate, encode: Encode, takes_effort: bool) -> ReasoningFormat:
    start, end = "<|channel|>analysis<|message|>", "<|end|>"
    [end_id] = encode(end)
    key, _ = _rendered_thought(render)
    return ReasoningFormat(
        start,
        end,
        end_id,
        encode(start),
        encode(f"{end}<|start|>assistant{FINAL}"),
        None,
        always=True,
        starts=(f"<|start|>assistant{start}",),
        noise=HARMONY_NOISE,
        history_key=key,
        takes_effort=takes_effort,
    )


def _takes_effort(render: RenderTemplate) -> bool:
    low, high = (render([ASKED], add_generation_prompt=True, reasoning_effort=effort) for effort in ("low", "high"))
    return low != high


def _rendered_thought(render: RenderTemplate) -> tuple[str | None, str]:
    """Return the key of a thought in a message, and the rendered conversation; (None, '') if thoughts are dropped."""
    for key in HISTORY_KEYS:
        text = render([ASKED, {"role": "assistant", "content": "Cprobe", key: "Rprobe"}]) or ""
        if "Rprobe" in text and "Cprobe" in text:
            return key, text.partition("Uprobe")[2]
    return None, ""


def _closing(text: str, end: str) -> str:
    """Return the text between a thought and its answer; '' if it is more than the end marker and white space."""
    between = text.partition("Rprobe")[2].partition("Cprobe")[0] if "Rprobe" in text else text
    return between if between.count(end) == 1 and not between.replace(end, "").strip() else ""


def _opening_gap(text: str, start: str) -> str:
    behind = text.partition(start)[2]
    gap = behind[: len(behind) - len(behind.lstrip())]
    return gap if behind[len(gap) :].startswith("Rprobe") else gap[:1]
