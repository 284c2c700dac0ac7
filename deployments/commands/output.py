"""The output of the verbs: figures and tables to standard output, notes and errors to standard error."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PIPE_COLUMNS = 160


class CommandError(Exception):
    """A verb cannot do what it was asked for; the message is for the user."""


class UsageError(CommandError):
    """The arguments of the command line cannot be used."""


def say(text: str) -> None:
    """Print a note to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Print text to standard output."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    show(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def printable(text: object) -> str:
    """Return text that cannot move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() else "�" for char in str(text))


def size(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB below one."""
    if abs(num_bytes) < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


@contextmanager
def bytes_progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, if that is a terminal, while bytes come; yields what adds some to it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns: tuple[Any, ...] = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table. Columns whose name begins with `#` are numbers and right-aligned.

    Args:
        columns: Names of the columns.
        rows: A value for each column; None is shown as nothing.
        title: Printed above.
    """
    console().print(table(columns, rows, title))


def console() -> Any:
    """Return a rich console for standard output. What is not read on a terminal has wide lines."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Any:
    """Return a table for a rich console, see show_table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        is_number = column.startswith("#")
        made.add_column(column.removeprefix("#"), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if value is None else printable(value)) for value in row))
    return made
