"""Faults at the seams of real parts: a certain call fails, hangs, or something else happens first.

Parts know nothing of it. `Faulty` stands in front of a real part and passes everything on; the calls that are seams go
by a `Faults` object, before and after the part has done its work.
"""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from engine.worker.decode import JoiningRow

WAIT_S = 120.0
"""No test waits longer for anything that a fault holds up: then the test itself is wrong."""

Phase = Literal["before", "after"]


class Injected(Exception):
    """The error that a seam raises unless another one is asked for."""


@dataclass
class Armed:
    """One fault. It happens at the `call`-th passage of its seam, and at as many from there on as `times` says.

    of: only calls that are about this request, or about this row of it (`name/index`), count. behind: none counts
    before that one has happened. num_fired: how often it has happened.
    """

    seam: str
    do: Callable[[], Any]
    call: int = 1
    phase: Phase = "before"
    of: str | None = None
    times: float = 1
    behind: "Armed | None" = None
    num_passed: int = 0
    num_fired: int = 0

    def passes(self, seam: str, phase: Phase, names: set[str]) -> bool:
        """Counts the passage; True when it is time."""
        if (seam, phase) != (self.seam, self.phase) or (self.of is not None and self.of not in names):
            return False
        if self.behind is not None and not self.behind.num_fired:
            return False
        self.num_passed += 1
        is_due = self.call <= self.num_passed < self.call + self.times
        self.num_fired += is_due
        return is_due


class Faults:
    """Armed from any thread; they happen on the thread that passes. num_passed: by seam, whatever is armed there."""

    def __init__(self) -> None:
        self.num_passed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._armed: list[Armed] = []

    def arm(self, seam: str, do: Callable[[], Any], **when: Any) -> Armed:
        """when: see Armed."""
        armed = Armed(seam, do, **when)
        with self._lock:
            self._armed.append(armed)
        return armed

    def clear(self) -> None:
        with self._lock:
            self._armed.clear()

    def at(self, seam: str, phase: Phase, names: Iterable[str] = ()) -> None:
        for armed in self._due(seam, phase, names):
            armed.do()

    async def reach(self, seam: str, phase: Phase) -> None:
        """As `at`, for seams on an event loop: what happens there may take its time (`Stalling`)."""
        for armed in self._due(seam, phase, ()):
            result: Any = armed.do()
            if inspect.isawaitable(result):
                await result

    def _due(self, seam: str, phase: Phase, names: Iterable[str]) -> list[Armed]:
        with self._lock:
            self.num_passed[seam] += phase == "before"
            return [armed for armed in self._armed if armed.passes(seam, phase, set(names))]

    def around(self, call: Callable[..., Any], seam: str, names: Iterable[str] = ()) -> Callable[..., Any]:
        """The same function with the seam before and after it. names: of whom it is, besides what its arguments say."""

        @wraps(call)
        def called(*args: Any, **options: Any) -> Any:
            about = {*names, *names_in(args)}
            self.at(seam, "before", about)
            result = call(*args, **options)
            self.at(seam, "after", about)
            return result

        return called


class Faulty:
    """A real part; calls of the methods in `seams` (method -> seam) go by the faults. names: whose part it is."""

    def __init__(self, part: Any, faults: Faults, seams: Mapping[str, str], names: Iterable[str] = ()):
        self._part = part
        self._faults = faults
        self._seams = seams
        self._names = tuple(names)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        seam = self._seams.get(name)
        return value if seam is None else self._faults.around(value, seam, self._names)


def names_in(args: Iterable[Any]) -> set[str]:
    """The requests and rows that a call's arguments speak of: row ids, Rows, EngineRequests, JoiningRows, lists."""
    names = set()
    for arg in args:
        if isinstance(arg, str):
            names |= _names_of(arg)
        elif isinstance(arg, list | tuple):
            names |= names_in(arg)
        elif isinstance(arg, dict):
            names |= names_in(arg.keys())
        elif isinstance(arg, JoiningRow):
            names |= names_in([arg.row])
        elif isinstance(one := getattr(arg, "id", None) or getattr(arg, "request_id", None), str):
            names |= _names_of(one)
    return names


def _names_of(row_id: str) -> set[str]:
    """`name#7/2` is the row `name/2` of the request `name`; the engine gives every request a number of its own."""
    name, _, rest = row_id.partition("#")
    index = (rest or row_id).partition("/")[2]
    name = name.partition("/")[0]
    return {name, f"{name}/{index}"} if index else {name}


def nothing() -> None:
    """Only marks that a seam was passed."""


class Failing:
    """Raises the like of an error: one that is kept would hold on to all that the frames of its traceback know."""

    def __init__(self, error: Exception | None = None):
        self._error = error or Injected("something inside a library")

    def __call__(self) -> None:
        raise copy(self._error)


class Hanging:
    """Blocks whoever comes by until it is released; `with` releases it in any case."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self._released = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self._released.wait(WAIT_S), f"nobody has released it within {WAIT_S:.0f} s"

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> "Hanging":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Stalling:
    """Makes whoever comes by on an event loop wait until it is released, or for ever."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self._released = asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        await self._released.wait()

    def release(self) -> None:
        self._released.set()


class Meanwhile:
    """Lets something happen in the event loop, from its beginning to its end, while the thread that comes by waits.

    Belongs to the loop that is running when it is made; the seam must be passed on another thread.
    """

    def __init__(self, act: Callable[[], Coroutine[Any, Any, Any]]):
        self._act = act
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        asyncio.run_coroutine_threadsafe(self._act(), self._loop).result(WAIT_S)
