"""Access: middleware that checks Host, Origin, API key and content type, and answers CORS preflights."""

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.api_keys import LOCAL_KEY, NO_KEY, KeyIdentity
from deployments.http.body_encoding import ENCODINGS
from deployments.http.client_address import is_ip_address, is_local, is_loopback_name
from deployments.http.config import HttpConfig
from deployments.http.dialect import Dialect, DialectTable
from deployments.http.error_map import ErrorMap
from deployments.http.errors import Refusal, shown
from deployments.http.live_keys import LiveKeys
from deployments.http.rate_limits import KINDS
from deployments.http.shared_limits import SharedLimits

READY_PATHS = ("/health/ready", "/health", "/ping")
"""The second is vLLM's, the third what container platforms ask for."""
OPEN_PATHS = ("/health/live", *READY_PATHS)
"""Routes without checks: load balancers call them without a key, and some with a foreign Host header."""

PAGE_PATH, PAGE_FILES = "/", "/page/"
"""The page and the start of the paths of its files, which contain no data: a browser loads them before it has a key."""

_CORS_METHODS = "GET, POST, DELETE"
_CORS_EXPOSED = ("retry-after", "x-orchard-ignored", "x-orchard-timing", "x-orchard-node")
_CORS_MAX_AGE_S = "600"


class HostNotAllowed(Refusal):
    """The Host header, args[0], is not a name of this server."""

    status, code = 403, "host_not_allowed"

    @property
    def message(self) -> str:
        return (
            f"The Host header is {shown(self.args[0])}: this server accepts loopback names, IP addresses and the names "
            "in http.allowed_hosts."
        )


class OriginNotAllowed(Refusal):
    """Web pages of the origin in the Origin header, args[0], may not send requests."""

    status, code = 403, "origin_not_allowed"

    @property
    def message(self) -> str:
        return (
            f"The Origin header is {shown(self.args[0])}: this server accepts requests of its own web pages and of the "
            "origins in http.allowed_origins."
        )


class WrongContentType(Refusal):
    """The Content-Type, args[0], is not JSON; '' if the header is missing."""

    status, code = 415, "unsupported_media_type"

    @property
    def message(self) -> str:
        sent = f"is {shown(self.args[0])}" if self.args[0] else "is missing"
        return f"The Content-Type of the request {sent}; it must be application/json."


class WrongContentEncoding(Refusal):
    """The Content-Encoding, args[0], is not supported."""

    status, code = 415, "unsupported_media_type"

    @property
    def message(self) -> str:
        return f"The Content-Encoding of the request is {shown(self.args[0])}; it may be gzip, deflate or identity."


class KeyRequired(Refusal):
    """The request has no accepted API key."""

    status, code = 401, "invalid_api_key"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}

    @property
    def message(self) -> str:
        return "This server requires a valid API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`."


class AdministratorOnly(Refusal):
    """The method and route in args[0] are for administrators only."""

    status, code = 403, "not_administrative"

    @property
    def message(self) -> str:
        return (
            f"{self.args[0]} is an administrative request: it requires an administrative API key or, on a server "
            "without API keys, a connection from the same machine without a gateway."
        )


class AccessRules:
    """Access rules from the configuration. They use only the ASGI scope of a request.

    Args:
        config: HTTP settings.
        dialects: The dialects of the server.

    Raises:
        ApiKeysError: See read_api_keys.

    Attributes:
        dialects: The dialects of the server.
        keys: The keys in force.
    """

    def __init__(self, config: HttpConfig, dialects: DialectTable):
        self.dialects = dialects
        self._needs_key = config.needs_key
        self.keys = LiveKeys(config)
        self._allowed_hosts = frozenset(name.lower().removesuffix(".") for name in config.allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in config.allowed_origins)
        self._takes_any_host = not config.allowed_hosts and bool(config.open or config.needs_key)

    def check_source(self, scope: Scope) -> None:
        """Check Host and Origin.

        Raises:
            HostNotAllowed: The Host header is not a name of this server.
            OriginNotAllowed: The web page may not send requests, nor read the error.
        """
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return
        for host in headers.getlist("host"):
            if not (self._takes_any_host or self._is_own(host)):
                raise HostNotAllowed(host)
        if (origin := headers.get("origin")) is not None and not self.allows_origin(origin, headers.get("host", "")):
            raise OriginNotAllowed(origin)

    def identify(self, scope: Scope) -> KeyIdentity:
        """Return the identity of a request's API key. Raises KeyRequired, WrongContentType, WrongContentEncoding."""
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS or _is_of_page(scope):
            return NO_KEY
        key = self._key_of(scope, headers)
        if _has_body(scope, headers) and not _is_json(headers.get("content-type", "")):
            raise WrongContentType(headers.get("content-type", ""))
        if (encoding := headers.get("content-encoding", "identity")).lower() not in ENCODINGS:
            raise WrongContentEncoding(encoding)
        return key

    def _key_of(self, scope: Scope, headers: Headers) -> KeyIdentity:
        """Find the identity of a request. On a server without keys, programs on this machine are administrative.

        A local program that names a foreign Host is not trusted: it may be a browser with a page that bound its own
        name to this address (DNS rebinding).
        """
        if not self._needs_key:
            is_trusted = is_local(scope) and all(map(self._is_own, headers.getlist("host")))
            return LOCAL_KEY if is_trusted else NO_KEY
        found = [self.keys.find(sent) for sent in _sent_keys(self.dialects.of(scope["path"]), headers)]
        key = next((identity for identity in found if identity is not None), None)
        if key is None:
            raise KeyRequired
        return key

    def allows_origin(self, origin: str, host: str) -> bool:
        """Tell whether pages of an origin may send requests. Own pages have the Host, checked before, as origin."""
        own = urlsplit(origin).netloc.lower()
        return origin.lower() in self._allowed_origins or (own != "" and own == host.lower())

    def _is_own(self, host: str) -> bool:
        """Tell whether a Host is this server's. IP addresses are, as DNS rebinding needs a name."""
        name = _without_port(host)
        return is_loopback_name(name) or is_ip_address(name) or name in self._allowed_hosts


class Access:
    """Middleware: applies AccessRules, answers CORS preflights, and adds rate limit and CORS headers.

    Sets `state.key` to the KeyIdentity of the request, and `state.is_administrative`.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, errors: ErrorMap, limits: SharedLimits):
        self._app = app
        self._rules = rules
        self._errors = errors
        self._limits = limits
        exposed = ("x-request-id", *rules.dialects.id_headers, *_CORS_EXPOSED)
        self._exposed = ", ".join((*exposed, *rules.dialects.limit_header_names(KINDS)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        origin = Headers(scope=scope).get("origin")
        try:
            self._rules.check_source(scope)
            if is_preflight(scope) and origin is not None:
                return await _preflight_response(scope, origin)(scope, receive, send)
            send = send if origin is None else _send_with_origin(send, origin, self._exposed)
            if await self._rules.keys.refresh():
                self._limits.follow(self._rules.keys.identities)
            key = self._rules.identify(scope)
        except Refusal as refusal:
            return await self._errors.response(refusal, scope["state"]["request_id"], scope)(scope, receive, send)
        scope["state"].update(key=key, is_administrative=key.is_administrative)
        await self._app(scope, receive, self._send_with_limits(send, scope, key))

    def _send_with_limits(self, send: Send, scope: Scope, key: KeyIdentity) -> Send:
        """Wrap `send` to add the rate limit headers of the key to the response; no headers for a key without limits."""
        if not key.limits:
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._limits.headers(key, self._rules.dialects.of(scope["path"])))
            await send(message)

        return send_with_limits


def _send_with_origin(send: Send, origin: str, exposed: str) -> Send:
    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = exposed
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_origin


def _sent_keys(dialect: Dialect, headers: Headers) -> list[str]:
    """Return the keys that a request sends, in order of preference; see Dialect.x_api_key_decides."""
    own = [key for key in headers.getlist("x-api-key") if key]
    bearer = []
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            bearer.append(key.strip())
    return (own or bearer) if dialect.x_api_key_decides else bearer + own


def _is_of_page(scope: Scope) -> bool:
    """Tell whether a request reads the page or one of its files."""
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path == PAGE_PATH or path.startswith(PAGE_FILES))


def is_preflight(scope: Scope) -> bool:
    """Tell whether a request is a CORS preflight, which browsers send without a key."""
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
    """Return the name or address of a Host header in lower case, IPv6 without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _has_body(scope: Scope, headers: Headers) -> bool:
    has_length = headers.get("content-length", "0").strip("0") != ""
    return scope["method"] in ("POST", "PUT", "PATCH") and (has_length or "transfer-encoding" in headers)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"
