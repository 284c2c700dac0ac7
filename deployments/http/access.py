"""Access: which requests are let in (Host, Origin, API key, content type), and which are administrative."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.client_address import is_ip_address, is_local, is_loopback_name
from deployments.http.config import HttpConfig
from deployments.http.errors import ErrorMap, Refusal, shown

OPEN_PATHS = ("/health/live", "/health/ready")
"""Load balancers ask them without a key, and some without a Host header that names this server."""

_CORS_METHODS = "GET, POST, DELETE"
_CORS_EXPOSED = "x-request-id, retry-after"
_CORS_MAX_AGE_S = "600"


class HostNotAllowed(Refusal):
    """host: the name that was sent."""

    status, code = 403, "host_not_allowed"

    @property
    def message(self) -> str:
        return (
            f"The Host header names {shown(self.args[0])}, which this server does not answer for: it answers for "
            "loopback names, IP addresses and the names in http.allowed_hosts."
        )


class OriginNotAllowed(Refusal):
    """origin: that of the web page."""

    status, code = 403, "origin_not_allowed"

    @property
    def message(self) -> str:
        return (
            f"Web pages of {shown(self.args[0])} may not send requests to this server: it takes them from its own "
            "pages and from the origins in http.allowed_origins."
        )


class WrongContentType(Refusal):
    """content_type: what was sent, '' if the header is missing."""

    status, code = 415, "unsupported_media_type"

    @property
    def message(self) -> str:
        sent = f"is {shown(self.args[0])}" if self.args[0] else "is missing"
        return f"The Content-Type of the request {sent}; it must be application/json."


class KeyRequired(Refusal):
    status, code = 401, "invalid_api_key"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}

    @property
    def message(self) -> str:
        return "This server needs one of its API keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`."


class AdministratorOnly(Refusal):
    """what: the action that was asked for."""

    status, code = 403, "not_administrative"

    @property
    def message(self) -> str:
        return (
            f"{self.args[0]} is an administrative request: it needs an API key, or, on a server without API keys, to "
            "come from the same machine and not through a gateway."
        )


class AccessRules:
    """What the configuration says about a request, judged by its scope alone."""

    def __init__(self, config: HttpConfig):
        self._key_hashes = [bytes.fromhex(key.removeprefix("sha256:")) for key in config.api_keys]
        self._allowed_hosts = frozenset(name.lower().removesuffix(".") for name in config.allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in config.allowed_origins)
        self._takes_any_host = not config.allowed_hosts and bool(config.open or config.api_keys)

    def check(self, scope: Scope) -> None:
        """Raises one of the refusals above for a request that may not come in."""
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return
        for host in headers.getlist("host"):
            if not (self._takes_any_host or self._is_own(host)):
                raise HostNotAllowed(host)
        if (origin := headers.get("origin")) is not None and not self.allows_origin(origin, headers.get("host", "")):
            raise OriginNotAllowed(origin)
        if is_preflight(scope):
            return
        if self._key_hashes and not self._has_key(headers):
            raise KeyRequired
        if _has_body(scope, headers) and not _is_json(headers.get("content-type", "")):
            raise WrongContentType(headers.get("content-type", ""))

    def is_administrative(self, scope: Scope) -> bool:
        """Whether the request has a key, or, without configured keys, comes from a program on this machine.

        A name that is not this server's own is no reason to trust a local program: it may be a browser in which a
        foreign page has bound its name to this address.
        """
        headers = Headers(scope=scope)
        if self._key_hashes:
            return self._has_key(headers)
        return is_local(scope) and all(map(self._is_own, headers.getlist("host")))

    def allows_origin(self, origin: str, host: str) -> bool:
        """The server's own pages have the Host of the request as their origin; the Host has been checked before."""
        own = urlsplit(origin).netloc.lower()
        return origin.lower() in self._allowed_origins or (own != "" and own == host.lower())

    def _is_own(self, host: str) -> bool:
        """An IP address cannot be bound to another one, as the name of a foreign page can (DNS rebinding)."""
        name = _without_port(host)
        return is_loopback_name(name) or is_ip_address(name) or name in self._allowed_hosts

    def _has_key(self, headers: Headers) -> bool:
        sent = headers.getlist("x-api-key")
        for value in headers.getlist("authorization"):
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                sent.append(key.strip())
        hashes = [hashlib.sha256(key.encode("latin-1")).digest() for key in sent]
        return any([hmac.compare_digest(ours, theirs) for ours in self._key_hashes for theirs in hashes])


class Access:
    """Middleware: refuses what AccessRules refuses, answers CORS preflights, and sets `state.is_administrative`."""

    def __init__(self, app: ASGIApp, rules: AccessRules, errors: ErrorMap):
        self._app = app
        self._rules = rules
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._rules.check(scope)
        except Refusal as refusal:
            return await self._errors.response(refusal, scope["state"]["request_id"], scope)(scope, receive, send)
        scope["state"]["is_administrative"] = self._rules.is_administrative(scope)
        origin = Headers(scope=scope).get("origin")
        if origin is None:
            return await self._app(scope, receive, send)
        if is_preflight(scope):
            return await _preflight_response(scope, origin)(scope, receive, send)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Access-Control-Allow-Origin"] = origin
                headers["Access-Control-Expose-Headers"] = _CORS_EXPOSED
                headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_with_origin)


def is_preflight(scope: Scope) -> bool:
    """A browser asks whether a page may send a request that it has not sent yet; it sends no key with it."""
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _preflight_response(scope: Scope, origin: str) -> Response:
    asked = Headers(scope=scope)
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": asked.get("access-control-request-headers", "content-type, authorization"),
        "Access-Control-Max-Age": _CORS_MAX_AGE_S,
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if asked.get("access-control-request-private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=headers)


def _without_port(host: str) -> str:
    """The name or address in a Host header in lower case, IPv6 without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _has_body(scope: Scope, headers: Headers) -> bool:
    has_length = headers.get("content-length", "0").strip("0") != ""
    return scope["method"] in ("POST", "PUT", "PATCH") and (has_length or "transfer-encoding" in headers)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"
