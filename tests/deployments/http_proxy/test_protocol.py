"""Connections that are slow, silent or endless, at a server that is started as Serve starts its HTTP proxy."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.serve._private.http_util import configure_http_middlewares, start_asgi_http_server
from ray.serve.config import HTTPOptions
from uvicorn.protocols.http import auto

from deployments.http_proxy import guard, protocol
from deployments.http_proxy.guard import ProxyState
from deployments.http_proxy.protocol import MAX_HEADER_BYTES, GuardedProtocol

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHUNK = b"x" * 2**16


class App:
    """Answers with as many chunks as it is told, and notes what becomes of its requests."""

    def __init__(self, num_chunks: int = 0, chunk: bytes = CHUNK):
        self.num_chunks = num_chunks
        self.chunk = chunk
        self.num_sent = 0
        self.num_left = 0
        self.num_done = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left = asyncio.ensure_future(self._left(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.num_chunks):
            if left.done():
                break
            await send({"type": "http.response.body", "body": self.chunk, "more_body": True})
            self.num_sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        left.cancel()
        self.num_done += 1

    async def _left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """serving(app): the port of Serve's own HTTP server around the app, with the middleware that the hook gives."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # put back at the end

    @asynccontextmanager
    async def serve(app: Any, send_timeout_s: float = 60.0, buffer_bytes: int = 0) -> AsyncIterator[int]:
        options = configure_http_middlewares(HTTPOptions(host="127.0.0.1", port=0, keep_alive_timeout_s=5))
        (middleware,) = options.middlewares
        state = middleware.kwargs["state"]
        assert isinstance(state, ProxyState)
        state.limits = guard.ProxyLimits(send_timeout_s=send_timeout_s)
        loop = asyncio.get_running_loop()
        task, server = await start_asgi_http_server(app, options, event_loop=loop)
        while not server.started:
            await asyncio.sleep(0.01)
        if buffer_bytes:
            monkeypatch.setattr(protocol, "SEND_BUFFER_BYTES", buffer_bytes)
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task

    return serve


def run(work: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def opened(port: int) -> Stream:
    return await asyncio.open_connection("127.0.0.1", port)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Returns when the server has closed the connection, with or without a reset."""
    try:
        while await reader.read(2**16):
            pass
    except ConnectionError:
        pass
    return True


REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_client_that_reads_nothing_is_disconnected_and_its_request_ends(serving: Any):
    async def go() -> None:
        app = App(num_chunks=1000)
        async with serving(app, send_timeout_s=0.3) as port:
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
                silent.connect(("127.0.0.1", port))
                silent.sendall(REQUEST)
                await until(lambda: app.num_done == 1)
            assert app.num_left == 1
            assert 0 < app.num_sent * len(CHUNK) < 2 * 2**20 + len(CHUNK), "the buffers of both sides are bounded"

    run(go())


def test_slowly_reading_client_gets_the_whole_response(serving: Any):
    async def go() -> None:
        app = App(num_chunks=200)
        async with serving(app, send_timeout_s=0.5) as port:
            reader, writer = await opened(port)
            writer.write(REQUEST)
            num_bytes = 0
            while not (piece := await reader.read(2**18)).endswith(b"0\r\n\r\n"):
                num_bytes += len(piece)
                await asyncio.sleep(0.02)
            assert num_bytes + len(piece) > 200 * len(CHUNK)
            assert (app.num_done, app.num_left) == (1, 0)
            await close(writer)

    run(go())


def test_connection_is_aborted_when_the_end_of_its_response_stays_unread(serving: Any, monkeypatch: Any):
    async def go() -> None:
        unsent = []
        abort = GuardedProtocol.abort

        def noted(connection: GuardedProtocol) -> None:
            unsent.append(connection.transport.get_write_buffer_size())
            abort(connection)

        monkeypatch.setattr(GuardedProtocol, "abort", noted)
        app = App(num_chunks=1, chunk=b"x" * 50_000)  # less than what makes writing pause
        async with serving(app, send_timeout_s=0.2, buffer_bytes=4096) as port:
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                silent.connect(("127.0.0.1", port))
                silent.sendall(REQUEST)
                await until(lambda: bool(unsent))
        assert app.num_done == 1 and unsent[0] > 0

    run(go())


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"\r\n", REQUEST + b"GET / HTTP/1.1\r\nA: b\r\n"])
def test_connection_with_incomplete_headers_is_closed_after_a_timeout(serving: Any, monkeypatch: Any, sent: bytes):
    monkeypatch.setattr(GuardedProtocol, "header_timeout_s", 0.2)

    async def go() -> None:
        async with serving(App()) as port:
            reader, writer = await opened(port)
            writer.write(sent)
            async with asyncio.timeout(4):  # the keep-alive timer would need 5 s
                assert await is_closed(reader)
            await close(writer)

    run(go())


@pytest.mark.parametrize("before", [b"", REQUEST])
def test_endless_headers_are_refused(serving: Any, before: bytes):
    async def go() -> None:
        async with serving(App()) as port:
            reader, writer = await opened(port)
            writer.write(before + b"GET / HTTP/1.1\r\nA: ")
            closed = asyncio.ensure_future(is_closed(reader))
            for _ in range(100):
                writer.write(b"a" * (MAX_HEADER_BYTES // 4))
                await asyncio.sleep(0.01)
                if closed.done():
                    break
            assert closed.done() and await closed
            await close(writer)

    run(go())


def test_an_endless_body_after_its_response_closes_the_connection(serving: Any, monkeypatch: Any):
    monkeypatch.setattr(GuardedProtocol, "linger_s", 0.2)

    async def go() -> None:
        async with serving(App()) as port:
            reader, writer = await opened(port)
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            async with asyncio.timeout(4):
                assert await is_closed(reader)
            await close(writer)

    run(go())


@pytest.mark.parametrize("version, headers, is_chunked, num_answers", [
    ("1.1", b"", False, 2),
    ("1.1", b"", True, 2),
    ("1.1", b"Connection: close\r\n", False, 1),
    ("1.1", b"Connection: close\r\n", True, 1),
    ("1.0", b"", False, 1),
])  # fmt: skip
def test_a_client_that_sends_its_whole_body_before_it_reads_gets_an_early_response(
    serving: Any, version: str, headers: bytes, is_chunked: bool, num_answers: int
):
    size = 2**24  # more than the buffers of both sides
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % size
    head = b"POST / HTTP/%b\r\nHost: localhost\r\n%b%b\r\n\r\n" % (version.encode(), headers, length)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size)) if is_chunked else bytes(size)
    next_request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    def client(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head)
            answers = bytearray(connection.recv(12))  # the response has begun; it is lost if sending fails from now on
            connection.sendall(body)
            if num_answers == 2:
                connection.sendall(next_request)
            while data := connection.recv(2**16):
                answers += data
            return bytes(answers)

    async def go() -> None:
        async with serving(App(num_chunks=1, chunk=b"early")) as port:
            answers = await asyncio.to_thread(client, port)
        assert (answers.count(b"HTTP/1.1 200"), answers.count(b"early")) == (num_answers, num_answers)

    run(go())


def test_an_endless_body_behind_the_last_response_closes_the_connection(serving: Any, monkeypatch: Any):
    monkeypatch.setattr(GuardedProtocol, "linger_s", 0.2)

    async def go() -> None:
        async with serving(App()) as port:
            reader, writer = await opened(port)
            writer.write(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n{")
            assert await is_closed(reader)  # at once: nothing more will be sent
            async with asyncio.timeout(30):
                while not writer.transport.is_closing():
                    writer.write(b" ")
                    await asyncio.sleep(0.05)
            await close(writer)

    run(go())


def test_consecutive_requests_on_a_connection_are_answered(serving: Any, monkeypatch: Any):
    monkeypatch.setattr(GuardedProtocol, "header_timeout_s", 0.3)

    async def go() -> None:
        app = App()
        async with serving(app) as port:
            reader, writer = await opened(port)
            for number in range(4):
                writer.write(REQUEST * 2)
                for _ in range(2):
                    await reader.readuntil(b"0\r\n\r\n")
                await asyncio.sleep(0.2)
                assert app.num_done == 2 * (number + 1)
            await close(writer)

    run(go())


class WaitingApp(App):
    """Waits before its answer, which has a length or not."""

    def __init__(self, headers: list[tuple[bytes, bytes]] | None = None):
        super().__init__()
        self.headers = headers or []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left = asyncio.ensure_future(self._left(receive))
        await asyncio.wait(
            (left, answer := asyncio.ensure_future(self.may_answer.wait())), return_when="FIRST_COMPLETED"
        )
        answer.cancel()
        if not left.done():
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            for chunk in (b"one", b"two"):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        left.cancel()
        self.num_done += 1


@pytest.mark.parametrize("headers", [[], [(b"Content-Length", b"6")]])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_only_http_1_1_gets_chunks_and_the_end_of_the_connection_ends_an_answer_to_1_0(serving, version, headers):
    async def go() -> None:
        app = WaitingApp(headers)
        app.may_answer.set()
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
            writer.close()
        is_chunked = version == "1.1" and not headers
        assert (b"transfer-encoding" in head.lower()) is is_chunked
        assert body == (b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" if is_chunked else b"onetwo")

    asyncio.run(go())


def test_a_client_that_has_shut_down_its_sending_side_gets_its_answer(serving):
    async def go() -> None:
        app = WaitingApp([(b"Content-Length", b"6")])
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            writer.write_eof()
            interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            app.may_answer.set()
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"onetwo") and app.num_left == 0

    asyncio.run(go())


def test_a_client_that_has_closed_its_socket_is_noticed_before_its_answer(serving):
    async def go() -> None:
        app = WaitingApp()
        async with serving(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            writer.close()
            await asyncio.wait_for(_until(lambda: app.num_done == 1), 30)
        assert app.num_left == 1

    asyncio.run(go())


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.01)
