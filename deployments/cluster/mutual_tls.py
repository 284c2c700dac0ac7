"""MachineTls: this machine's end of an encrypted connection, at which both ends show certificates of the cluster.

Only TLS 1.3. Both ends ask the ledger, because a certificate of the authority alone does not tell whether it was
revoked; and a client checks that the certificate is that of the address which it has connected to.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal, Protocol

from deployments.cluster.folder import ClusterFolder, FolderError, TlsFiles
from deployments.cluster.ledger import Ledger, Standing, fingerprint_of

ALPN = ("h2",)
"""gRPC's protocol, for the relay."""
AUTHORITY_PATH = "/authority"
"""Path at which a head shows the certificate of its authority, which is no secret, before any other question."""
MAX_AUTHORITY_BYTES = 2**14


OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class NotAdmitted(OSError):
    """The other end's certificate is refused; the message says why."""


class ClientTls(Protocol):
    """A client's end."""

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the encrypted connection, with the same time limit. Raises OSError."""
        ...


class GuestTls:
    """The end of a machine that has no certificate yet, and knows the authority.

    Args:
        authority: Certificate of the authority, as PEM.
    """

    def __init__(self, authority: str):
        self.authority = authority
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._context.load_verify_locations(cadata=authority)

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        return _connected(self._context, connection)


class MachineTls:
    """The end of a machine that has a certificate.

    Args:
        files: Its certificate and what belongs to it, which are read at once; the ledger, when it changes.

    Raises:
        FolderError: A file cannot be read.
    """

    def __init__(self, files: TlsFiles):
        self._ledger = Ledger(files.ledger)
        try:
            self._server = _context(ssl.PROTOCOL_TLS_SERVER)
            self._server.verify_mode = ssl.CERT_OPTIONAL
            self._server.num_tickets = 0
            self._client = _context(ssl.PROTOCOL_TLS_CLIENT)
            for context in (self._server, self._client):
                context.load_cert_chain(files.certificate, files.key)
                context.load_verify_locations(files.authority)
        except OSError as error:
            raise FolderError(
                f"the certificate of this machine, {files.certificate}, cannot be used: {error}; "
                "`orchard join HEAD --token TOKEN` gets a new one"
            ) from None

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a client's encrypted connection, with the same time limit.

        Raises:
            NotAdmitted: The ledger does not admit the server's certificate.
            OSError: The server has no certificate of the cluster for its address, or the connection ends.
        """
        connected = _connected(self._client, connection)
        self._refuse_unknown(connected)
        return connected

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a server's encrypted connection, with the same time limit; the client may have no certificate.

        Raises:
            OSError: The client's certificate is not of the authority, or the connection ends.
        """
        return self._server.wrap_socket(connection, server_side=True)

    def accept_machine(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a server's encrypted connection to a machine of the cluster.

        Raises:
            NotAdmitted: The client has no certificate, or not one that the ledger admits.
            OSError: The client's certificate is not of the authority, or the connection ends.
        """
        accepted = self.accept(connection)
        self._refuse_unknown(accepted)
        return accepted

    def standing(self, connection: ssl.SSLSocket | ssl.SSLObject) -> Standing | Literal["none"]:
        """Tell whether the ledger admits the other end; `none`: it has shown no certificate. Raises FolderError."""
        certificate = connection.getpeercert(binary_form=True)
        return "none" if certificate is None else self._ledger.standing(certificate)

    async def listen(self, on_connection: OnConnection, host: str, port: int) -> asyncio.Server:
        """Accept connections in an event loop; on_connection asks `is_machine`. Raises OSError."""
        return await asyncio.start_server(on_connection, host, port, ssl=self._server)

    async def open(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect in an event loop, see `connect`. Raises NotAdmitted, OSError."""
        reader, writer = await asyncio.open_connection(host, port, ssl=self._client, server_hostname=host)
        try:
            self._refuse_unknown(writer.get_extra_info("ssl_object"))
        except NotAdmitted:
            writer.close()
            raise
        return reader, writer

    def is_machine(self, writer: asyncio.StreamWriter) -> bool:
        """Tell whether the ledger admits the client of a connection in an event loop."""
        with contextlib.suppress(FolderError):
            return self.standing(writer.get_extra_info("ssl_object")) == "admitted"
        return False

    def _refuse_unknown(self, connection: ssl.SSLSocket | ssl.SSLObject) -> None:
        """Close a connection and raise NotAdmitted if the ledger does not admit the other end, or cannot be read."""
        try:
            standing = self.standing(connection)
            reason = None if standing == "admitted" else f"its certificate is {standing}"
        except FolderError as error:
            reason = str(error)
        if reason is not None:
            if isinstance(connection, ssl.SSLSocket):
                connection.close()
            raise NotAdmitted(reason)


def machine_tls(folder: ClusterFolder) -> MachineTls | None:
    """Return the end of this machine; None if its cluster has no TLS. Raises FolderError."""
    return MachineTls(folder.tls) if folder.tls.certificate.exists() else None


def machine_tls_in(environ: Mapping[str, str]) -> MachineTls | None:
    """Return the end that Ray's processes of this machine have; None without TLS, or with another cluster's.

    Raises:
        FolderError: A file cannot be read.
    """
    if environ.get("RAY_USE_TLS") != "1":
        return None
    files = ClusterFolder(Path(environ.get("RAY_TLS_SERVER_CERT", "")).parent).tls
    return MachineTls(files) if files.ledger.exists() else None


def fetch_authority(host: str, port: int, fingerprint: str, timeout_s: float) -> GuestTls:
    """Ask a head for the certificate of its authority, and check it; nothing secret is sent.

    Args:
        host: The head.
        port: Its port for `orchard join`.
        fingerprint: SHA-256 of the certificate, from the token.
        timeout_s: Longest silence of the head.

    Raises:
        NotAdmitted: The head has another authority.
        OSError: No head answers, or not with TLS.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.connect()
        connection.sock = context.wrap_socket(connection.sock)
        connection.request("GET", AUTHORITY_PATH)
        authority = connection.getresponse().read(MAX_AUTHORITY_BYTES).decode(errors="replace")
        found = fingerprint_of(authority)
    except (HTTPException, ValueError):
        raise NotAdmitted(f"{host}:{port} shows no certificate of a cluster") from None
    finally:
        connection.close()
    if found != fingerprint:
        raise NotAdmitted(
            f"{host}:{port} is not the head that the token is of: its certificate has the fingerprint {found[:16]}.., "
            f"the token {fingerprint[:16]}.."
        )
    return GuestTls(authority)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(list(ALPN))
    return context


def _connected(context: ssl.SSLContext, connection: socket.socket) -> ssl.SSLSocket:
    return context.wrap_socket(connection, server_hostname=connection.getpeername()[0])
