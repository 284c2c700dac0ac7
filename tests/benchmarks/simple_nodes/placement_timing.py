"""CPU time of placing one request, without its keys and without the calls between processes."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle

from deployments.placement.place import Placement
from engine.placement import ConversationKeys, Question, Quote
from tests.benchmarks.sim_runner import MAC_27B
from tests.benchmarks.simple_nodes.device import Device
from tests.benchmarks.simple_nodes.loads import Clients, Load
from tests.support.clock import Clock

COLUMNS = (
    "nodes", "candidates, µs", "more, µs", "choose and remember, µs", "on the ingress' loop, µs",
    "one quote on an engine's loop, µs", "booking there, µs", "questions", "in all, µs",
)  # fmt: skip

NUM_REQUESTS, NUM_CONVERSATIONS = 2000, 500


def timing(num_nodes: int) -> list[str]:
    """Return a row of the table: the means over requests of conversations that are open."""
    rng, clock = random.Random(0), Clock(0.0)
    device = Device("node0", MAC_27B, clock, lambda turn: None)
    for _, turn in list(Clients(Load(agents=4), 1.0, 0.0, rng).begins()):
        device.take(turn)
    facts = device.facts
    placement = Placement()
    placement.update(type(facts)(f"node{i}", facts.room_bytes, pace_s=facts.pace_s) for i in range(num_nodes))
    questions = _questions(rng)
    quote = device.quoter.quote(next(questions))
    busy = Quote(0, 10.0, quote.prefill_s, 0.0, 10.0)
    candidates_us = _mean_us(lambda: placement.candidates(next(questions)))
    asked = placement.candidates(next(questions))
    quotes: dict[str, Quote | None] = dict.fromkeys(asked, busy)
    more_us = _mean_us(lambda: placement.more(next(questions), quotes))
    choose_us = _mean_us(lambda: _choose(placement, next(questions), quotes))
    quote_us = _mean_us(lambda: device.quoter.quote(next(questions)))
    book_us = _mean_us(lambda: _book(device, next(questions)))
    on_loop_us, num_asked = candidates_us + more_us + choose_us, len(asked) + 3
    all_us = on_loop_us + num_asked * quote_us + book_us
    figures = (candidates_us, more_us, choose_us, on_loop_us, quote_us, book_us)
    return [str(num_nodes), *(f"{each:.0f}" for each in figures), str(num_asked), f"{all_us:.0f}"]


def _questions(rng: random.Random) -> Iterator[Question]:
    """Yield questions on conversations that have had ten turns."""
    system = rng.getrandbits(64)
    keys = [
        ConversationKeys(system, rng.getrandbits(64), tuple(rng.getrandbits(64) for _ in range(10)))
        for _ in range(NUM_CONVERSATIONS)
    ]
    for i, one in enumerate(cycle(keys)):
        yield Question(f"r{i}", one, 60_000)


def _choose(placement: Placement, question: Question, quotes: dict[str, Quote | None]) -> None:
    node_id = placement.choose(question, quotes)
    assert node_id is not None
    placement.placed(question, node_id)


def _book(device: Device, question: Question) -> None:
    device.quoter.book(question)
    device.quoter.bookings.remove(question.request_id)


def _mean_us(action: Callable[[], object]) -> float:
    """Return the mean microseconds of CPU time of a call."""
    began_s = time.process_time()
    for _ in range(NUM_REQUESTS):
        action()
    return 1e6 * (time.process_time() - began_s) / NUM_REQUESTS
