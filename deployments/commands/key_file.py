"""KeyFile: the file of http.api_keys_file, changed as a whole, by one writer at a time."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deployments.commands.output import CommandError
from deployments.http.api_keys import ApiKeyEntry, ApiKeysError, entries_in, read_entries
from engine.process_lock import LockHeld, ProcessLock

LOCK_TIMEOUT_S = 10.0


class KeyFile:
    """A file of API keys, which may not exist yet.

    Args:
        path: Its path; a link is followed.
    """

    def __init__(self, path: Path):
        self.path = Path(os.path.realpath(path))

    def entries(self) -> list[ApiKeyEntry]:
        """Return the keys; [] without a file. Raises CommandError."""
        if not self.path.exists():
            return []
        try:
            return read_entries(str(self.path))
        except ApiKeysError as error:
            raise CommandError(error.message) from None

    def add(self, entry: ApiKeyEntry) -> None:
        """Add a key. Raises CommandError: its name is taken, or the file cannot be written."""
        with self._locked():
            entries = self.entries()
            if any(one.name == entry.name for one in entries):
                raise CommandError(f"{self.path} has a key with the name {entry.name!r} already; revoke it first")
            self._write(_with(self._text(), entry), [*entries, entry])

    def remove(self, name: str) -> None:
        """Remove the key with this name. Raises CommandError: there is none, or the file cannot be written."""
        with self._locked():
            entries = self.entries()
            left = [one for one in entries if one.name != name]
            if len(left) == len(entries):
                known = ", ".join(one.name for one in entries) or "none"
                raise CommandError(f"{self.path} has no key with the name {name!r}; its keys: {known}")
            position = next(i for i, one in enumerate(entries) if one.name == name)
            self._write(_without(self._text(), position), left)

    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8") if self.path.exists() else ""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands from changing the file. The lock has a file of its own, as the other one is replaced."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = ProcessLock(self.path.with_name(f".{self.path.name}.lock"), LOCK_TIMEOUT_S)
        except LockHeld as held:
            raise CommandError(
                f"{self.path} has been locked for {LOCK_TIMEOUT_S:g} s by {held.holder}; try again"
            ) from None
        except OSError as error:
            raise CommandError(f"{self.path} cannot be changed: {error}") from None
        try:
            yield
        finally:
            lock.release()

    def _write(self, text: str | None, entries: list[ApiKeyEntry]) -> None:
        """Replace the file. The text with its comments is kept where it means the same as `entries`."""
        if text is None or not _means(text, entries):
            text = yaml.safe_dump([_plain(entry) for entry in entries], sort_keys=False)
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, prefix=f".{self.path.name}.", delete=False
            ) as file:  # its mode is 0600
                try:
                    self._keep_owner(file.fileno())
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise CommandError(f"{self.path} cannot be written, and is as it was: {error.strerror}") from None

    def _keep_owner(self, file: int) -> None:
        """Give a file the owner of the present one: root must not take it from the user who runs the server."""
        if self.path.exists() and (now := self.path.stat()).st_uid != os.geteuid():
            os.fchown(file, now.st_uid, now.st_gid)


def _plain(entry: ApiKeyEntry) -> dict[str, Any]:
    return entry.model_dump(mode="json", exclude_defaults=True)


def _means(text: str, entries: list[ApiKeyEntry]) -> bool:
    try:
        return entries_in(text, "") == entries
    except ApiKeysError:
        return False


def _with(text: str, entry: ApiKeyEntry) -> str:
    """Append a key to a list in YAML's block style; _write notices any other style."""
    before = text if not text or text.endswith("\n") else text + "\n"
    return before + yaml.safe_dump([_plain(entry)], sort_keys=False)


def _without(text: str, position: int) -> str | None:
    """Cut the lines of a key out of a list in YAML's block style; None for another style."""
    listed = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(listed, yaml.SequenceNode) or listed.flow_style or len(listed.value) == 1:
        return None
    starts = [item.start_mark.line for item in listed.value]
    end = starts[position + 1] if position + 1 < len(starts) else listed.end_mark.line
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[position]] + lines[end:])
