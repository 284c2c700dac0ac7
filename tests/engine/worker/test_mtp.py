"""How many drafts hold on the demo model: as many as with a head that has seen all of the prompt, however rows come.

What there is to reach was measured with mlx-vlm alone, the whole prompt in one forward and the head primed with it (in
blocks of 3: the newest token and *two* drafts): 1.00 in retrieval, 1.00 in tool calls, 0.96 in JSON; 0.16, 0.64 and
0.54 when the head has not seen the prompt. The head was trained for two tokens ahead, so with three drafts these
figures are those of the first two of a step. Of the third there is a figure of its own: of all three drafts mlx-vlm
accepts 1.00, 0.95 and 0.88 (blocks of 4).

Acceptance is accepted over drafted, and all drafts of a step count, also those behind one that was rejected. Drafts
behind the stop token are nobody's, neither drafted nor accepted. (That measurement counted them like others; as most of
them hold, the difference is 0.005 at most.)
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle, repeat

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.core.row import Row
from engine.core.runner import Drafts, RowOutput
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import drafter, drafting_head
from engine.worker.model_runner import MLXRunner
from tests.support.night import some_at_night
from tests.support.tasks import QUESTIONS, RETRIEVAL, TASKS, Prompt, Task, prompts

NUM_DRAFTS = 3
MAX_TOKENS = 150

FIRST_TWO = {"retrieval": 1.00, "tools": 1.00, "json": 0.96}
ALL_THREE = {"retrieval": 1.00, "tools": 0.95, "json": 0.95}
TOLERANCE = 0.03

SHORT: dict[str, tuple[Task, int, int]] = {
    "retrieval": (RETRIEVAL, 4, 7),
    "tools": (TASKS["tools"], 3, 30),
    "json": (TASKS["json"], 5, 15),
}
LONG: dict[str, tuple[Task, int, int]] = {
    "retrieval": (QUESTIONS, 2, 35),
    "tools": (TASKS["tools"], 2, 45),
    "json": (TASKS["json"], 4, 35),
}
"""Task, number of prompts, and the least tokens of an answer: those of LONG go on after 20 plain steps."""


class Answer:
    """One row, and what became of its drafts by depth, as far as the stop token."""

    def __init__(self, name: str, prompt: Prompt, stop_token_ids: Sequence[int]):
        sampling = SamplingParams(MAX_TOKENS, prompt.temperature)
        self.row = Row(EngineRequest(name, prompt.token_ids, sampling, ()))
        self.has_ended = False
        self.num_tokens = 0
        self.drafted, self.accepted = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
        self._stop_token_ids = frozenset(stop_token_ids)

    def take(self, output: RowOutput) -> None:
        end = next((i for i, token in enumerate(output.token_ids) if token in self._stop_token_ids), None)
        self.num_tokens += len(output.token_ids) if end is None else end
        self.has_ended = end is not None or self.num_tokens >= MAX_TOKENS
        for depth in range(output.num_drafted if end is None else min(output.num_drafted, end + 1)):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < output.num_accepted


Answers = list[Answer]


def acceptance(answers: Answers, num_drafts: int) -> float:
    """Return the acceptance of the first `num_drafts` drafts of each step."""
    drafted = sum(sum(answer.drafted[:num_drafts]) for answer in answers)
    assert drafted >= 20, "too few to say anything"
    return sum(sum(answer.accepted[:num_drafts]) for answer in answers) / drafted


def join(runner: MLXRunner, answer: Answer, chunk: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    while (output := runner.prefill([answer.row], chunk)).first is None:
        meanwhile()
    answer.take(output.first[answer.row.id])


def decode(runner: MLXRunner, answers: Answers, num_drafts: int) -> None:
    """One step; rows that have ended leave."""
    outputs = runner.decode(Drafts(num_drafts))
    going = [answer for answer in answers if answer.row.id in outputs and not answer.has_ended]
    for answer in going:
        answer.take(outputs[answer.row.id])
    runner.drop([answer.row.id for answer in going if answer.has_ended])


def decode_all(
    runner: MLXRunner, answers: Answers, num_drafts: Iterable[int] = repeat(NUM_DRAFTS), others: Sequence[Answer] = ()
) -> None:
    """Until all answers have ended; others run along."""
    for k in num_drafts:
        if all(answer.has_ended for answer in answers):
            return
        decode(runner, [*answers, *others], k)


def alone(runner: MLXRunner, answers: Answers, others: Answers) -> None:
    for answer in answers:
        join(runner, answer, chunk=10_000)
        decode_all(runner, [answer])


def chunked(runner: MLXRunner, answers: Answers, others: Answers) -> None:
    for answer in answers:
        join(runner, answer, chunk=64)
    decode_all(runner, answers)


def into_a_running_batch(runner: MLXRunner, answers: Answers, others: Answers) -> None:
    """Rows come one after the other, with steps of all between their chunks, and leave when they have ended."""
    for answer in others:
        join(runner, answer, chunk=10_000)
    decode_all(runner, others, [NUM_DRAFTS] * 4)
    for answer in answers:
        join(runner, answer, 64, meanwhile=lambda: decode(runner, [*others, *answers], NUM_DRAFTS))
        decode(runner, [*others, *answers], NUM_DRAFTS)
    decode_all(runner, answers, others=others)


def after_plain_steps(runner: MLXRunner, answers: Answers, others: Answers) -> None:
    for answer in answers:
        join(runner, answer, chunk=10_000)
    decode_all(runner, answers, chain(repeat(0, 21), cycle([3, 3, 1, 3, 0, 0, 3, 2, 3, 3, 0, 3])))


@pytest.fixture(scope="module")
def begin(tokenizer: ChatTokenizer) -> Callable[..., Answers]:
    made: dict[tuple[Task, int, int], list[Prompt]] = {}

    def make(task: Task, count: int, min_answer_tokens: int, name: str = "row") -> Answers:
        key = task, count, min_answer_tokens
        if key not in made:
            made[key] = prompts(task, count, tokenizer, "acceptance", min_answer_tokens)
        return [Answer(f"{name} {i}", prompt, tokenizer.stop_token_ids) for i, prompt in enumerate(made[key])]

    return make


@pytest.fixture
def stories(begin: Callable[..., Answers]) -> Answers:
    return begin(TASKS["stories"], 2, 1, "story")


@pytest.fixture(autouse=True)
def leave_nothing(runner: MLXRunner, stories: Answers) -> Iterable[None]:
    yield
    runner.reset()


def check(name: str, task: str, answers: Answers) -> None:
    two, three = acceptance(answers, 2), acceptance(answers, 3)
    by_depth = " ".join(
        f"{sum(a.accepted[i] for a in answers)}/{sum(a.drafted[i] for a in answers)}" for i in range(NUM_DRAFTS)
    )
    sys.stdout.write(f"\n{name}, {task}: first two {two:.3f}, all three {three:.3f}, by depth {by_depth} ")
    assert two >= FIRST_TWO[task] - TOLERANCE
    assert three >= ALL_THREE[task] - TOLERANCE


@pytest.mark.parametrize("task", some_at_night(SHORT, ["retrieval", "json"], "calls are JSON between markup"))
@pytest.mark.parametrize(
    "arrive",
    some_at_night(
        [alone, chunked, into_a_running_batch], [into_a_running_batch], "rows that join others come in chunks"
    ),
)
def test_draft_acceptance_does_not_depend_on_how_a_row_arrives(runner, begin, stories, arrive, task):
    answers = begin(*SHORT[task])
    arrive(runner, answers, stories)
    check(arrive.__name__, task, answers)


@pytest.mark.parametrize(
    ("task", "limit", "chunk"),
    some_at_night(
        [*((task, drafter.MAX_PENDING, drafter.CATCH_UP_TOKENS) for task in LONG), ("json", 8, 3)],
        [("retrieval", drafter.MAX_PENDING, drafter.CATCH_UP_TOKENS), ("json", 8, 3)],
        "the gate has one task with much room for what waits, and one with little",
        are_sets=True,
    ),
)
def test_the_head_catches_up_after_steps_without_drafts(runner, begin, stories, monkeypatch, task, limit, chunk):
    """The last with little room for what waits: the head must catch up within the plain steps, a few tokens at a time,
    as it has to in answers longer than the demo model's."""
    monkeypatch.setattr(drafter, "MAX_PENDING", limit)
    monkeypatch.setattr(drafter, "CATCH_UP_TOKENS", chunk)
    answers = begin(*LONG[task])
    after_plain_steps(runner, answers, stories)
    check(f"after plain steps ({limit} may wait)", task, answers)


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_head_cache_is_the_same_however_the_prompt_is_cut_into_chunks(runner, begin, chunk):
    """The one across a border too, which acceptance hardly shows."""
    [answer, *_] = begin(*LONG["json"])
    whole, cut = runner._prefill.begin(answer.row), runner._prefill.begin(answer.row)
    runner._prefill.advance(whole, 10_000)
    while cut.done < answer.row.num_tokens:
        runner._prefill.advance(cut, chunk)
    for one, other in zip(whole.head_caches[0], cut.head_caches[0], strict=True):
        assert one.offset == other.offset == answer.row.num_tokens - 1
        assert all(mx.allclose(a, b, atol=1e-3) for a, b in zip(one.state[:2], other.state[:2], strict=True))


def test_a_head_that_has_not_seen_the_prompt_has_low_acceptance(runner, begin, stories, monkeypatch):
    prime = drafting_head.DraftingHead.prime

    def forgetful(self, next_token_ids, hidden, cache):
        prime(self, next_token_ids, hidden, cache)
        for layer in cache:
            layer.keys, layer.values = mx.zeros_like(layer.keys), mx.zeros_like(layer.values)

    monkeypatch.setattr(drafting_head.DraftingHead, "prime", forgetful)
    answers = begin(*SHORT["retrieval"])
    chunked(runner, answers, stories)
    sys.stdout.write(f"\nnot primed, retrieval: first two {acceptance(answers, 2):.3f} ")
    assert acceptance(answers, 2) < 0.6
