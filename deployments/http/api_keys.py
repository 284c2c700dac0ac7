"""API keys: reading them from the configuration, and the identity, limits and rights behind each key."""

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from deployments.http.config import ApiKey, HttpConfig
from deployments.requests import ChatRequest
from engine.config import Frozen
from engine.errors import OrchardError

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits that must not be set on a key file."""

Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~](?:[ -~]*[!-~])?$")]
"""Printable ASCII without leading or trailing spaces, for use in errors and logs."""


class ApiKeysError(OrchardError):
    """The API keys cannot be read. The message names the source and never quotes a key."""


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key, see shared_limits.py. None: no limit."""

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    """Prompt and completion tokens together."""
    max_rows: int | None = None
    """Choices in flight at once."""

    def __bool__(self) -> bool:
        return self != KeyLimits()


@dataclass(frozen=True)
class KeyIdentity:
    """Identity of a request's API key, in `request.state.key`. On a server without keys it is NO_KEY or LOCAL_KEY."""

    name: str
    """Label of the key, unique on this server; '' without a key."""
    tenant: str = ""
    """Requests of the same tenant share cached prefixes."""
    client: str = ""
    """Requests of the same client share one fair share of the engine."""
    is_administrative: bool = False
    limits: KeyLimits = KeyLimits()

    def apply(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the tenant and client of this key; unchanged on a server without keys.

        The key's tenant is joined with the request's own (`cache_salt`), and its client with the request's (`user`), so
        a request can subdivide its key's tenant and client but never name those of another key.
        """
        if not self.name:
            return request
        return replace(
            request, tenant=_joined(self.tenant, request.tenant), client=_joined(self.client, request.client)
        )


NO_KEY = KeyIdentity("")
"""Identity of a request to a health route or to a server without keys."""

LOCAL_KEY = KeyIdentity("", is_administrative=True)
"""Identity of a program on the same machine, on a server without keys."""


class ApiKeyEntry(Frozen):
    """One key in the file `http.api_keys_file`."""

    hash: ApiKey = Field(description="'sha256:' and the 64 hex digits of the key's SHA-256")
    name: Label = Field(description="label of the key in errors and logs, unique")
    tenant: Label | None = Field(default=None, description="keys with the same tenant share cached prefixes")
    client: Label | None = Field(default=None, description="keys with the same client share one fair share; null: name")
    is_administrative: bool = Field(default=False, description="may read full status pages and clear the prefix cache")
    max_requests_per_minute: int | None = Field(default=None, ge=1, description="requests that generate, per minute")
    max_tokens_per_minute: int | None = Field(default=None, ge=1, description="prompt and completion tokens together")
    max_rows: int | None = Field(default=None, ge=1, description="choices in flight at once")

    @property
    def identity(self) -> KeyIdentity:
        limits = KeyLimits(self.max_requests_per_minute, self.max_tokens_per_minute, self.max_rows)
        return KeyIdentity(self.name, self.tenant or "", self.client or self.name, self.is_administrative, limits)


_Entries = TypeAdapter(list[ApiKeyEntry])


class KeyRing:
    """The accepted keys, as hashes.

    Attributes:
        identities: The identities behind the keys.
    """

    def __init__(self, keys: Iterable[tuple[str, KeyIdentity]]):
        """Decode the hashes of the keys.

        Args:
            keys: Pairs of 'sha256:<64 hex digits>' and the identity of the key.
        """
        self._keys = [(bytes.fromhex(hash_.removeprefix("sha256:")), identity) for hash_, identity in keys]
        self.identities = tuple(identity for _, identity in self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, sent: str) -> KeyIdentity | None:
        """Return the identity of a key, None if it is unknown, in a time that is independent of the accepted keys."""
        digest = hashlib.sha256(sent.encode("latin-1")).digest()
        found = [identity for ours, identity in self._keys if hmac.compare_digest(ours, digest)]
        return found[0] if found and sent else None


def read_api_keys(config: HttpConfig, may_be_empty: bool = False) -> KeyRing:
    """Read the keys of http.api_keys, http.api_keys_file and http.api_keys_env.

    Args:
        config: Names their places.
        may_be_empty: Whether the file may have an empty list, as after its last key has been revoked.

    Raises:
        ApiKeysError: A file or variable is missing, malformed or readable by others, or a key is defined twice.
    """
    keys = [(f"http.api_keys[{i}]", hash_, _bare(f"api_keys[{i}]")) for i, hash_ in enumerate(config.api_keys)]
    if config.api_keys_file is not None:
        keys += _of_file(config.api_keys_file, may_be_empty)
    if config.api_keys_env is not None:
        keys += _of_variable(config.api_keys_env)
    _check_unique(keys)
    return KeyRing((hash_, identity) for _, hash_, identity in keys)


_Key = tuple[str, str, KeyIdentity]
"""Source of a key for errors, its hash, and its identity."""


def _bare(name: str) -> KeyIdentity:
    return KeyIdentity(name, is_administrative=True)


def _of_file(path: str, may_be_empty: bool) -> list[_Key]:
    place = _place(path)
    entries = entries_in(_read_private(Path(path).expanduser(), place), path)
    if not (entries or may_be_empty):
        raise ApiKeysError(f"{place} contains no keys")
    return [(f"{place}: [{i}]", entry.hash, entry.identity) for i, entry in enumerate(entries)]


def read_entries(path: str) -> list[ApiKeyEntry]:
    """Read the keys of a file as http.api_keys_file. Raises ApiKeysError."""
    entries = entries_in(_read_private(Path(path).expanduser(), _place(path)), path)
    _check_unique([(f"{_place(path)}: [{i}]", entry.hash, entry.identity) for i, entry in enumerate(entries)])
    return entries


def entries_in(text: str, path: str) -> list[ApiKeyEntry]:
    """Return the keys in the text of the file `path`. Raises ApiKeysError."""
    place = _place(path)
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its text would quote the file
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ApiKeysError(f"{place} is not valid YAML{line}: {error.problem}") from None
    except yaml.YAMLError:
        raise ApiKeysError(f"{place} is not valid YAML") from None
    try:
        return _Entries.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise ApiKeysError(f"{place}: {where or 'the file'}: {_mistake(first)}") from None


def _place(path: str) -> str:
    return f"http.api_keys_file: {path}"


def _read_private(path: Path, place: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & OTHERS:
                raise ApiKeysError(
                    f"{place} has the mode {mode:04o}: other users of this machine can read or change it. As ssh does "
                    f"with private keys, Orchard refuses such a file: chmod 600 {path}"
                )
            return file.read()
    except FileNotFoundError:
        raise ApiKeysError(f"{place} does not exist; every node on which an Ingress runs needs it") from None
    except OSError as error:
        raise ApiKeysError(f"{place} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ApiKeysError(f"{place} is not UTF-8") from None


def _mistake(finding: Any) -> str:
    match finding["type"]:
        case "list_type":
            return "expected a list of keys, each with `hash` and `name`"
        case "extra_forbidden":
            return f"unknown field; the fields are {', '.join(ApiKeyEntry.model_fields)}"
        case "missing":
            return "is missing"
    return finding["msg"]


def _of_variable(name: str) -> Iterator[_Key]:
    place = f"http.api_keys_env: the environment variable {name}"
    if name not in os.environ:
        raise ApiKeysError(f"{place} is not set; every node on which an Ingress runs needs it when Ray starts")
    for i, key in enumerate(os.environ[name].split(",")):
        key = key.strip()
        if not key:
            raise ApiKeysError(f"{place}: key {i + 1} is empty; the variable must list plain keys, separated by commas")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ApiKeysError(f"{place}: key {i + 1} has characters that an HTTP header cannot contain")
        yield f"{place}, key {i + 1}", f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", _bare(f"{name}[{i}]")


def _check_unique(keys: list[_Key]) -> None:
    places: dict[str, str] = {}
    for place, hash_, identity in keys:
        for unique, what in ((hash_, "hash"), (f"name {identity.name}", f"name {json.dumps(identity.name)}")):
            if unique in places:
                raise ApiKeysError(f"{place} has the same {what} as {places[unique]}: hashes and names must be unique")
            places[unique] = place


def _joined(own: str, sent: str) -> str:
    """Join a key's name with a client's, injectively: different pairs give different texts; two empty names give ''."""
    return f"{len(own)}:{own}{sent}" if own or sent else ""
