"""What a hostile peer would try on a block server with the first blocks of a model. After each attack an honest caller is
served, with the same result as before all of them."""

import argparse
import os
import socket
import struct

import wire

HONEST = [3, 1, 4, 1, 5]
OTHER = "127.0.0.2"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, help="host:port of a server with the first blocks")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--sessions", type=int, required=True, help="how many a client may have")
    parser.add_argument("--calls", type=int, required=True, help="how many a client may have at once")
    options = parser.parse_args()
    attack = Attack(options)
    expected = attack.honest()
    for name in [name for name in dir(Attack) if name.startswith("try_")]:
        getattr(attack, name)()
        assert attack.honest() == expected, name
        print(name, "ok", flush=True)


class Attack:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        host, port = options.server.rsplit(":", 1)
        self.address = (host, int(port))

    def call(self, data: bytes, source: str = None) -> dict:
        return wire.exchange(self.options.server, self.options.local, data, source)

    def honest(self) -> bytes:
        """Two calls of a fresh session, from another address than the attacks: the second one's hidden states."""
        session = fresh()
        first = self.call(wire.tokens_request(session, 0, HONEST), OTHER)
        assert first["error"] is None and first["shape"] == [1, len(HONEST), self.options.hidden], first["error"]
        second = self.call(wire.tokens_request(session, len(HONEST), [9]), OTHER)
        assert second["error"] is None and second["session_id"] == session, second["error"]
        return bytes(second["data"])

    def refused(self, data: bytes, why: str) -> None:
        answer = self.call(data)
        assert answer["error"] is not None and why in answer["error"], (why, answer["error"])
        assert answer["session_id"] == 0 and len(answer["data"]) == 0

    def begun(self) -> int:
        session = fresh()
        assert self.call(wire.tokens_request(session, 0, HONEST))["error"] is None
        return session

    def states(self, position: int, values: list, shape: list, session: int) -> bytes:
        return wire.request(session, position, "hidden_states", shape, wire.f16(values))

    def raw(self, data: bytes) -> bytes:
        """Sends bytes and the end of the stream. Returns what comes back before the server closes."""
        with socket.create_connection(self.address, 120) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                return rest(sock)
            except OSError:
                return b""

    def try_another_clients_session(self) -> None:
        session = self.begun()
        answer = self.call(wire.tokens_request(session, len(HONEST), [9]), OTHER)
        assert "is not known here" in answer["error"], answer["error"]
        # It still goes on for its owner; and the same id at position 0 is another session.
        assert self.call(wire.tokens_request(session, 0, [7, 8]), OTHER)["error"] is None
        mine = self.call(wire.tokens_request(session, len(HONEST), [9]))
        assert mine["error"] is None and bytes(mine["data"]) == self.honest()

    def try_gaps(self) -> None:
        self.refused(wire.tokens_request(fresh(), 3, [1]), "is not known here")
        session = self.begun()
        self.refused(wire.tokens_request(session, len(HONEST) + 1, [1]), "the rows begin at 6")
        self.refused(wire.tokens_request(session, (1 << 32) - 1, [1]), "too long")
        # The session is as it was.
        assert bytes(self.call(wire.tokens_request(session, len(HONEST), [9]))["data"]) == self.honest()

    def try_tokens_that_are_none(self) -> None:
        self.refused(wire.tokens_request(fresh(), 0, [1 << 31]), "vocabulary")
        self.refused(wire.request(fresh(), 0, "token_ids", [0], b""), "token ids")
        self.refused(wire.request(fresh(), 0, "token_ids", [1], b"\0\0\0"), "token ids")
        self.refused(wire.tokens_request(fresh(), 0, [1] * 100_000), "too long")

    def try_values_that_are_not_finite(self) -> None:
        hidden = self.options.hidden
        for value in (float("nan"), float("inf"), float("-inf")):
            row = [0.0] * (hidden - 1) + [value]
            self.refused(self.states(0, row, [1, 1, hidden], fresh()), "not finite")

    def try_wrong_shapes(self) -> None:
        hidden = self.options.hidden
        row = [0.0] * hidden
        for values, shape, why in (
            (row, [1, hidden], "hidden states have shape"),
            (row, [1, 1, hidden - 1], "does not have"),
            (row[1:], [1, 1, hidden - 1], "hidden states have shape"),
            (row, [1, 1 << 31, 1 << 31, 4], "does not have"),
            ([], [1, 0, hidden], "hidden states have shape"),
            (row * 2, [2, 1, hidden], "hidden states have shape"),
            (row, [1] * 99 + [hidden], "dimensions"),
        ):
            self.refused(self.states(0, values, shape, fresh()), why)

    def try_requests_that_are_none(self) -> None:
        for data, why in (
            (b"", "ends within"),
            (b"\xc1", "type"),
            (b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", "missing"),
            (b"\xdd\xff\xff\xff\xff", "ends within"),
            (wire.pack({"session_id": 1}), "missing"),
            (wire.request(1, 0, "weights", [1], b"\0\0\0\0"), "payload type"),
        ):
            self.refused(data, why)

    def try_frames_that_are_cut_or_too_long(self) -> None:
        data = wire.tokens_request(fresh(), 0, HONEST)
        whole = wire.frame(data if self.options.local else wire.call_envelope(os.urandom(16), data), self.options.local)
        for cut in range(0, len(whole), 7):
            assert self.raw(whole[:cut]) == b"", cut
        for header in (b"\xff\xff\xff\x7f", b"\xff" * 16, struct.pack("<I", (64 << 20) + 1)):
            assert self.raw(header + bytes(1000)) == b""
        assert self.raw(os.urandom(5000)) == b""

    def try_many_sessions(self) -> None:
        """Nobody closes sessions: those that are not used make room, and only for others of their client."""
        others = fresh()
        assert self.call(wire.tokens_request(others, 0, HONEST), OTHER)["error"] is None
        sessions = [self.begun() for _ in range(self.options.sessions + 3)]
        for index, session in enumerate(sessions):
            answer = self.call(wire.tokens_request(session, len(HONEST), [9]))
            if index < 3:
                assert "is not known here" in answer["error"], (index, answer["error"])
            else:
                assert answer["error"] is None, (index, answer["error"])
        assert self.call(wire.tokens_request(others, len(HONEST), [9]), OTHER)["error"] is None

    def try_to_say_nothing_for_long(self) -> None:
        """Connections that send a little and then nothing: the server ends each. Some are refused at once."""
        socks = [socket.create_connection(self.address, 120) for _ in range(self.options.calls + 40)]
        for index, sock in enumerate(socks):
            try:
                sock.sendall(b"\x80\x01"[: index % 3])
            except OSError:
                pass
        expected = self.honest()
        for sock in socks:
            with sock:
                rest(sock)
        assert self.honest() == expected

    def try_calls_that_are_not_for_us(self) -> None:
        if self.options.local:
            return
        call, data = os.urandom(16), wire.tokens_request(fresh(), 0, HONEST)
        for envelope in (
            wire.reply_envelope(call, data),
            wire.error_envelope(call, "x"),
            wire.field(1, call),
            wire.field(1, call[:8]) + wire.call_envelope(call, data)[18:],
            wire.field(1, call) + wire.field(3, wire.field(3, data)),
            wire.field(1, call) + wire.field(2, b""),
        ):
            assert self.raw(wire.frame(envelope, False)) == b""


def fresh() -> int:
    return int.from_bytes(os.urandom(8), "big")


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes, or resets, the connection."""
    found = b""
    try:
        while part := sock.recv(1 << 16):
            found += part
    except ConnectionError:
        pass
    return found


main()
