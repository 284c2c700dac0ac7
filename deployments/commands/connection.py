"""Connection: how the verbs ask a running server, with the standard library's HTTP client, which imports quickly."""

import argparse
import base64
import http.client
import json
import os
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from deployments.commands.output import CommandError, UsageError, printable

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "ORCHARD_API_KEY"
TIMEOUT_S = 60.0
"""Longest wait for one read. A stream without events sends a comment every 10 s."""
MAX_SHOWN = 2000
"""Characters of an unexpected answer that an error quotes."""


class Unreachable(CommandError):
    """No server answers at the URL."""


class Refused(CommandError):
    """The server has answered with an error.

    Args:
        message: For the user.
        status: Of the answer; 200 for an error within a stream.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the server and its key."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server; default: {DEFAULT_URL}")
    parser.add_argument(
        "--key",
        help=f"API key, visible to other users of the machine; default: the variable {KEY_VARIABLE}, which is not",
    )


def connection_of(options: argparse.Namespace, timeout_s: float = TIMEOUT_S) -> "Connection":
    """Return the connection that the options name. Raises UsageError."""
    return Connection(options.url, options.key or os.environ.get(KEY_VARIABLE), timeout_s)


class Connection:
    """A server, asked by one TCP connection per request, without proxies.

    Args:
        url: Its base URL; a path in front of `/v1` belongs to it.
        key: API key; None to send none.
        timeout_s: Seconds of one read.

    Attributes:
        url: Base URL without `/v1` and trailing slash.
        key: The API key.

    Raises:
        UsageError: The URL or the key cannot be used.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S):
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.key = key
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(self.url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"--url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment or parts.username:
            raise UsageError(f"--url is {url!r}; it must be like {DEFAULT_URL}")
        self._is_encrypted = parts.scheme == "https"
        self._prefix = parts.path
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise UsageError(f"--key or {KEY_VARIABLE} must be printable ASCII without spaces around it")

    def get(self, path: str) -> Any:
        """Return the JSON value of a GET. Raises Unreachable, Refused."""
        with self._ask("GET", path) as answer:
            return _json(answer.read(), self.url, path)

    def status(self) -> dict[str, Any]:
        """Return the body of /v1/status. Raises Unreachable, Refused."""
        status = self.get("/v1/status")
        if not (isinstance(status, dict) and isinstance(status.get("engines"), list)):
            raise Refused(f"{self.url} is no Orchard server: its /v1/status names no engines", 200)
        return status

    def text(self, path: str) -> str:
        """Return the text of a GET. Raises Unreachable, Refused."""
        with self._ask("GET", path) as answer:
            return answer.read().decode(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON value that answers a JSON body. Raises Unreachable, Refused."""
        with self._ask("POST", path, body) as answer:
            return _json(answer.read(), self.url, path)

    def delete(self, path: str) -> Any:
        """Return the JSON value that answers a DELETE. Raises Unreachable, Refused."""
        with self._ask("DELETE", path) as answer:
            return _json(answer.read(), self.url, path)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events that answer a JSON body with `stream`. Raises Unreachable, Refused.

        Closing the generator closes the connection, which frees the request's row.
        """
        with self._ask("POST", path, body) as answer:
            while line := answer.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _json(data, self.url, path)
                if isinstance(event.get("error"), dict):
                    raise Refused(f"{self.url} ended the answer: {printable(event['error'].get('message'))}", 200)
                yield event
            raise Unreachable(f"{self.url} ended the answer to {path} before its end")

    @contextmanager
    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, content, headers)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise self._refusal(answer, f"{method} {path}")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
            raise Unreachable(
                f"no server answers at {self.url} ({reason}). Start one with `orchard serve`, or name another by --url"
            ) from None
        finally:
            connection.close()

    def _refusal(self, answer: http.client.HTTPResponse, request: str) -> Refused:
        content = answer.read(MAX_SHOWN).decode(errors="replace")
        if answer.status == 401:
            sent = "the key that was sent is not valid" if self.key else f"give one by {KEY_VARIABLE} or --key"
            return Refused(f"{self.url} requires an API key: {sent}", 401)
        try:
            message = json.loads(content)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = "a web page" if content.lstrip().startswith("<") else content.strip()[:200]
            message = f"{text or answer.reason} (is this an Orchard server?)"
        return Refused(f"{self.url} answered {request} with {answer.status}: {printable(message)}", answer.status)


def _json(content: bytes, url: str, path: str) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        shown = printable(content[:100].decode(errors="replace"))
        raise Refused(f"{url} is no Orchard server: it answered {path} with {shown!r}", 200) from None


def data_url(content: bytes, media_type: str) -> str:
    """Return content as a data: URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _reason(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, TimeoutError):
        return "it timed out"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
