"""HashStore: the state behind the store of Ray's GCS, and the commands of Redis that read and change it.

Each command is documented at https://redis.io/docs/latest/commands/. There is one database, without expiry.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from deployments.cluster.resp import CommandFailed, Reply, Status

INT64 = range(-(2**63), 2**63)
FIELDS_PER_COMMAND = 256
"""Fields of one HSET with which a hash is written again."""

Hash = dict[bytes, bytes]


class Command(NamedTuple):
    """How a command is carried out."""

    run: Callable[["HashStore", Sequence[bytes]], Reply]
    least: int
    """Fewest arguments after the name."""
    most: int | None = None
    """Most arguments after the name; None: any number."""
    grows: bool = False
    """Whether it can add to the state."""


class HashStore:
    """Keys whose values are hashes or counters.

    Attributes:
        num_bytes: Of all keys, fields and values.
        num_changes: Grows whenever a command has changed something.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, Hash | bytes] = {}
        self.num_bytes = 0
        self.num_changes = 0

    def run(self, words: Sequence[bytes]) -> Reply:
        """Run a command and return its reply. Raises CommandFailed."""
        command = command_of(words)
        return command.run(self, words[1:])

    def commands(self) -> Iterator[list[bytes]]:
        """Yield commands that make an empty store equal to this one."""
        for key, value in self._values.items():
            if isinstance(value, bytes):
                yield [b"INCRBY", key, value]
                continue
            pairs = [word for pair in value.items() for word in pair]
            for i in range(0, len(pairs), 2 * FIELDS_PER_COMMAND):
                yield [b"HSET", key, *pairs[i : i + 2 * FIELDS_PER_COMMAND]]

    def _ping(self, words: Sequence[bytes]) -> Reply:
        return words[0] if words else Status(b"PONG")

    def _info(self, words: Sequence[bytes]) -> Reply:
        """Ray asks for the section `sentinel`, which a server that is no sentinel leaves empty."""
        if words and words[0].lower() not in (b"server", b"default", b"all", b"everything"):
            return b""
        return b"# Server\r\nredis_mode:standalone\r\n"

    def _del(self, words: Sequence[bytes]) -> Reply:
        removed = 0
        for key in words:
            value = self._values.pop(key, None)
            if value is not None:
                removed += 1
                self._changed(-len(key) - _size(value))
        return removed

    def _hset(self, words: Sequence[bytes]) -> Reply:
        if len(words) % 2 == 0:
            raise _wrong_number(b"hset")
        return sum(self._put(words[0], words[i], words[i + 1]) for i in range(1, len(words), 2))

    def _hsetnx(self, words: Sequence[bytes]) -> Reply:
        key, field, value = words
        return 0 if field in self._hash(key) else int(self._put(key, field, value))

    def _hget(self, words: Sequence[bytes]) -> Reply:
        return self._hash(words[0]).get(words[1])

    def _hmget(self, words: Sequence[bytes]) -> Reply:
        found = self._hash(words[0])
        return [found.get(field) for field in words[1:]]

    def _hexists(self, words: Sequence[bytes]) -> Reply:
        return int(words[1] in self._hash(words[0]))

    def _hdel(self, words: Sequence[bytes]) -> Reply:
        key, found, removed = words[0], self._hash(words[0]), 0
        for field in words[1:]:
            if (value := found.pop(field, None)) is not None:
                removed += 1
                self._changed(-len(field) - len(value))
        if removed and not found:
            del self._values[key]
            self._changed(-len(key))
        return removed

    def _hscan(self, words: Sequence[bytes]) -> Reply:
        """Return all matching fields in one reply, as Redis does for small hashes: COUNT is a hint."""
        if not words[1].isdigit():
            raise CommandFailed("ERR invalid cursor")
        pattern: re.Pattern[bytes] | None = None
        options = [word.upper() for word in words[2::2]]
        if len(words) % 2 or any(option not in (b"MATCH", b"COUNT") for option in options):
            raise CommandFailed("ERR syntax error")
        for option, value in zip(options, words[3::2], strict=True):
            if option == b"MATCH":
                pattern = _glob(value)
            elif _integer(value) < 1:
                raise CommandFailed("ERR syntax error")
        found = self._hash(words[0]) if int(words[1]) == 0 else {}
        pairs = [pair for pair in found.items() if pattern is None or pattern.fullmatch(pair[0])]
        return [b"0", [word for pair in pairs for word in pair]]

    def _incrby(self, words: Sequence[bytes]) -> Reply:
        key, old = words[0], self._values.get(words[0], b"0")
        if not isinstance(old, bytes):
            raise _wrong_type()
        if (value := int(old) + _integer(words[1])) not in INT64:
            raise CommandFailed("ERR increment or decrement would overflow")
        new = b"%d" % value
        self._changed(len(new) - len(old) if key in self._values else len(key) + len(new))
        self._values[key] = new
        return value

    def _hash(self, key: bytes) -> Hash:
        """Return the hash of a key, an empty one if there is none."""
        value = self._values.get(key, {})
        if isinstance(value, bytes):
            raise _wrong_type()
        return value

    def _put(self, key: bytes, field: bytes, value: bytes) -> bool:
        """Set a field; return whether it is new."""
        found = self._hash(key)
        old = found.get(field)
        growth = len(value) - len(old) if old is not None else len(field) + len(value)
        self._changed(growth + (0 if found else len(key)))
        found[field] = value
        self._values[key] = found
        return old is None

    def _changed(self, growth: int) -> None:
        self.num_bytes += growth
        self.num_changes += 1


COMMANDS = {
    b"PING": Command(HashStore._ping, 0, 1),
    b"INFO": Command(HashStore._info, 0),
    b"DEL": Command(HashStore._del, 1),
    b"UNLINK": Command(HashStore._del, 1),
    b"HSET": Command(HashStore._hset, 3, grows=True),
    b"HSETNX": Command(HashStore._hsetnx, 3, 3, grows=True),
    b"HGET": Command(HashStore._hget, 2, 2),
    b"HMGET": Command(HashStore._hmget, 2),
    b"HEXISTS": Command(HashStore._hexists, 2, 2),
    b"HDEL": Command(HashStore._hdel, 2),
    b"HSCAN": Command(HashStore._hscan, 2),
    b"INCRBY": Command(HashStore._incrby, 2, 2, grows=True),
}
"""All that Ray 2.60's GCS sends, besides AUTH, which belongs to a connection."""


def command_of(words: Sequence[bytes]) -> Command:
    """Return the command that the words name, with a right number of arguments. Raises CommandFailed."""
    if not words:
        raise CommandFailed("ERR empty command")
    command = COMMANDS.get(words[0].upper())
    if command is None:
        raise CommandFailed(f"ERR unknown command '{words[0][:64].decode(errors='replace')}'")
    num_arguments = len(words) - 1
    if num_arguments < command.least or (command.most is not None and num_arguments > command.most):
        raise _wrong_number(words[0])
    return command


def _wrong_number(name: bytes) -> CommandFailed:
    return CommandFailed(f"ERR wrong number of arguments for '{name.lower().decode()}' command")


def _wrong_type() -> CommandFailed:
    return CommandFailed("WRONGTYPE Operation against a key holding the wrong kind of value")


def _size(value: Hash | bytes) -> int:
    return len(value) if isinstance(value, bytes) else sum(len(field) + len(one) for field, one in value.items())


def _integer(word: bytes) -> int:
    if not re.fullmatch(rb"-?[0-9]{1,19}", word) or int(word) not in INT64:
        raise CommandFailed("ERR value is not an integer or out of range")
    return int(word)


def _glob(pattern: bytes) -> re.Pattern[bytes]:
    r"""Compile a pattern of Redis: `*`, `?`, `[a-c]`, `[^a]`, and `\` before a literal character."""
    parts: list[bytes] = []
    i = 0
    while i < len(pattern):
        char = pattern[i : i + 1]
        if char == b"\\" and i + 1 < len(pattern):
            i += 1
            parts.append(re.escape(pattern[i : i + 1]))
        elif char == b"[" and (end := pattern.find(b"]", i + 1)) > 0:
            parts.append(_class(pattern[i + 1 : end]))
            i = end
        else:
            parts.append({b"*": b".*", b"?": b"."}.get(char, re.escape(char)))
        i += 1
    return re.compile(b"".join(parts), re.DOTALL)


def _class(inside: bytes) -> bytes:
    """Return a character class of `re`."""
    sign, inside = (b"^", inside[1:]) if inside[:1] == b"^" else (b"", inside)
    if not inside:
        return b"(?!)" if not sign else b"."
    escaped = b"".join(b"-" if char == 0x2D else re.escape(bytes((char,))) for char in inside)
    return b"[%b%b]" % (sign, escaped)
