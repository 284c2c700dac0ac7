"""Sockets to child processes have large buffers, whatever the system gives by default."""

import socket

from engine.socket_pair import BUFFER_BYTES, wide_socket_pair


def test_both_ends_have_large_buffers_and_are_connected():
    ours, theirs = wide_socket_pair()
    with ours, theirs:
        for one in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                assert one.getsockopt(socket.SOL_SOCKET, option) >= BUFFER_BYTES
        ours.sendall(b"a")
        assert theirs.recv(2) == b"a"


def test_a_pair_takes_a_large_piece_without_a_reader():
    ours, theirs = wide_socket_pair()
    with ours, theirs:
        ours.setblocking(False)
        assert ours.send(bytes(BUFFER_BYTES)) > BUFFER_BYTES // 4
