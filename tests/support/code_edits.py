"""Edits of modules of this repository, as a user asks a model for them: the change in words, and the whole file."""

from dataclasses import dataclass

import numpy as np

from engine.processing.tokenizer import ChatTokenizer
from tests.support.real_weights import ROOT

QUESTION = "{change} Return the whole file.\n\n```python\n{text}```"
ANSWER = "```python\n{text}```"


@dataclass(frozen=True)
class CodeEdit:
    """One edit."""

    path: str
    """The module, relative to the repository."""
    change: str
    """The change, in the words of the prompt."""
    replaced: tuple[tuple[str, str], ...]
    """Each text, all occurrences of which are replaced, and what takes its place."""

    @property
    def before(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @property
    def after(self) -> str:
        text = self.before
        for old, new in self.replaced:
            assert old in text, f"{self.path} has no {old!r} any more: describe another edit of it"
            text = text.replace(old, new)
        return text

    def prompt(self, tokenizer: ChatTokenizer) -> np.ndarray:
        """Return the tokens of the question, int32."""
        question = QUESTION.format(change=self.change, text=self.before)
        return tokenizer.encode_chat([{"role": "user", "content": question}], template_kwargs={})

    def answer(self, tokenizer: ChatTokenizer) -> np.ndarray:
        """Return the tokens of the true answer, int32."""
        return tokenizer.encode_text(ANSWER.format(text=self.after), adds_special=False)


EDITS = (
    CodeEdit("engine/histogram.py", "Rename the method `observe` to `record`.", (("observe", "record"),)),
    CodeEdit(
        "deployments/placement/homes.py",
        "Add a method `forget` that removes a conversation.",
        (
            (
                "    def put(",
                "    def forget(self, conversation: int) -> None:\n"
                '        """Remove a conversation, if it is known."""\n'
                "        self._nodes.pop(conversation, None)\n\n"
                "    def put(",
            ),
        ),
    ),
    CodeEdit(
        "engine/worker/pooling.py",
        "Let `vector` raise a ValueError instead of returning None.",
        (
            ("-> bytes | None:", "-> bytes:"),
            ("of norm 1; None if it is not finite.", "of norm 1."),
            (
                "            return None\n",
                '            raise ValueError(f"the norm of the pooled state is {length}")\n',
            ),
        ),
    ),
    CodeEdit(
        "engine/worker/prompt_logprobs.py",
        "Add a property `total`, the sum of the logprobs of all tokens.",
        (
            (
                "    def entries(",
                "    @property\n"
                "    def total(self) -> float:\n"
                "        return sum(one.logprob for one in self._found)\n\n"
                "    def entries(",
            ),
        ),
    ),
    CodeEdit(
        "engine/processing/fingerprint.py",
        "Use blake2b instead of sha256, and include chat_template.jinja.",
        (("sha256", "blake2b"), ('    "merges.txt",\n', '    "merges.txt",\n    "chat_template.jinja",\n')),
    ),
    CodeEdit(
        "deployments/http/allowance.py",
        "Let `duration` write hours, such as 1h0m0s.",
        (
            (
                "    minutes, rest_ms = divmod(num_ms, 60_000)\n    return f\"{f'{minutes}m' if minutes else ''}",
                "    minutes, rest_ms = divmod(num_ms, 60_000)\n"
                "    hours, minutes = divmod(minutes, 60)\n"
                "    return f\"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}",
            ),
        ),
    ),
    CodeEdit(
        "deployments/process.py",
        "Add the number of threads to `replica_info`.",
        (
            (
                '        "has_mlx"',
                '        "num_threads": psutil.Process().num_threads(),\n        "has_mlx"',
            ),
        ),
    ),
    CodeEdit(
        "deployments/cluster/proof.py",
        "Add a function `is_equal` that compares two proofs in constant time.",
        (
            (
                "def _mac(",
                "def is_equal(first: str, second: str) -> bool:\n"
                '    """Tell whether two proofs are equal, in a time that does not depend on where they differ."""\n'
                "    return hmac.compare_digest(first, second)\n\n\n"
                "def _mac(",
            ),
        ),
    ),
    CodeEdit(
        "engine/core/virtual_token_counter.py",
        "Rename `MAX_IDLE_CLIENTS` to `IDLE_CLIENTS_LIMIT`, and set it to 2048.",
        (("MAX_IDLE_CLIENTS = 1024", "MAX_IDLE_CLIENTS = 2048"), ("MAX_IDLE_CLIENTS", "IDLE_CLIENTS_LIMIT")),
    ),
    CodeEdit(
        "deployments/http/answer_id.py",
        "Make the tag 3 bytes long and the random part 13 bytes.",
        (
            ("TAG_BYTES = 2", "TAG_BYTES = 3"),
            ("RANDOM_BYTES = 14", "RANDOM_BYTES = 13"),
            ("4 hexa", "6 hexa"),
            ("first four", "first six"),
        ),
    ),
)
