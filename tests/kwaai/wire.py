"""KwaaiNet's block protocol: MessagePack, the unary envelope, frames, f16. Written from the facts of the protocol alone."""

import os
import socket
import struct

FRAME_MAX = 10 << 20
PROTOCOL = "/kwaai/inference/1.0.0"


class Closed(Exception):
    pass


class Extension:
    def __init__(self, kind: int, data: bytes):
        self.kind, self.data = kind, data


# MessagePack


def pack(value) -> bytes:
    """Of nil, booleans, numbers, texts, binaries, extensions, lists and maps, in their shortest forms."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        if -32 <= value < 0x80:
            return bytes([value & 0xFF])
        for marker, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
            if value < 1 << 8 * size:
                return bytes([marker]) + value.to_bytes(size, "big")
    if isinstance(value, str):
        text = value.encode()
        if len(text) < 32:
            return bytes([0xA0 + len(text)]) + text
        if len(text) < 256:
            return bytes([0xD9, len(text)]) + text
        return b"\xda" + struct.pack(">H", len(text)) + text
    if isinstance(value, Extension):
        return b"\xc9" + struct.pack(">IB", len(value.data), value.kind) + value.data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, list):
        return head(len(value), 0x90, 0xDC) + b"".join(map(pack, value))
    if isinstance(value, dict):
        return head(len(value), 0x80, 0xDE) + b"".join(pack(key) + pack(item) for key, item in value.items())
    raise TypeError(value)


def head(count: int, short: int, long: int) -> bytes:
    if count < 16:
        return bytes([short + count])
    if count < 1 << 16:
        return bytes([long]) + struct.pack(">H", count)
    return bytes([long + 1]) + struct.pack(">I", count)


def unpack(data: bytes):
    value, end = unpack_at(data, 0)
    assert end == len(data), "bytes follow the value"
    return value


def unpack_at(data: bytes, at: int) -> tuple:
    marker, at = data[at], at + 1
    if marker < 0x80:
        return marker, at
    if marker < 0x90:
        return unpack_map(data, at, marker - 0x80)
    if marker < 0xA0:
        return unpack_list(data, at, marker - 0x90)
    if marker < 0xC0:
        return data[at : at + marker - 0xA0].decode(), at + marker - 0xA0
    if marker == 0xC0:
        return None, at
    if marker in (0xC2, 0xC3):
        return marker == 0xC3, at
    if marker == 0xCB:
        return struct.unpack(">d", data[at : at + 8])[0], at + 8
    if marker in (0xC7, 0xC8, 0xC9):
        size = 1 << marker - 0xC7
        length, at = int.from_bytes(data[at : at + size], "big"), at + size
        return Extension(data[at], data[at + 1 : at + 1 + length]), at + 1 + length
    if marker >= 0xE0:
        return marker - 0x100, at
    for first, kind in ((0xC4, "bin"), (0xCC, "int"), (0xD9, "text")):
        size = 1 << marker - first if first <= marker else 16
        if size > (8 if kind == "int" else 4):
            continue
        number, at = int.from_bytes(data[at : at + size], "big"), at + size
        if kind == "int":
            return number, at
        taken = data[at : at + number]
        assert len(taken) == number, "truncated"
        return (taken if kind == "bin" else taken.decode()), at + number
    if marker in (0xDC, 0xDD, 0xDE, 0xDF):
        size = 2 if marker % 2 == 0 else 4
        count = int.from_bytes(data[at : at + size], "big")
        return (unpack_list if marker < 0xDE else unpack_map)(data, at + size, count)
    raise ValueError(f"marker {marker:02x}")


def unpack_list(data: bytes, at: int, count: int) -> tuple:
    values = []
    for _ in range(count):
        value, at = unpack_at(data, at)
        values.append(value)
    return values, at


def unpack_map(data: bytes, at: int, count: int) -> tuple:
    values = {}
    for _ in range(count):
        key, at = unpack_at(data, at)
        values[key], at = unpack_at(data, at)
    return values, at


# Requests and replies


def data_of(data: bytes, as_integers: bool):
    """KwaaiNet writes an array of integers, and reads a binary as well."""
    return list(data) if as_integers else data


def request(session: int, position: int, kind: str, shape: list, data: bytes, as_integers: bool = True) -> bytes:
    return pack(
        {
            "session_id": session,
            "seq_pos": position,
            "payload_type": kind,
            "shape": shape,
            "data": data_of(data, as_integers),
        }
    )


def tokens_request(session: int, position: int, tokens: list, as_integers: bool = True) -> bytes:
    data = b"".join(struct.pack("<I", token) for token in tokens)
    return request(session, position, "token_ids", [len(tokens)], data, as_integers)


def reply(session: int, kind: str, shape: list, data: bytes, error=None, as_integers: bool = True) -> bytes:
    return pack(
        {
            "session_id": session,
            "response_type": kind,
            "shape": shape,
            "data": data_of(data, as_integers),
            "error": error,
        }
    )


def failure(text: str) -> bytes:
    return reply(0, "hidden_states", [], b"", text)


def f16(values: list) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def of_f16(data: bytes) -> list:
    return list(struct.unpack(f"<{len(data) // 2}e", data))


# Envelopes: protocol buffers


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(message: bytes) -> dict:
    """Of messages that only have fields with a length."""
    found, at = {}, 0
    while at < len(message):
        tag, at = varint_at(message, at)
        assert tag & 7 == 2, tag
        length, at = varint_at(message, at)
        found[tag >> 3] = message[at : at + length]
        assert len(found[tag >> 3]) == length, "truncated"
        at += length
    return found


def varint_at(data: bytes, at: int) -> tuple:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def call_envelope(call: bytes, data: bytes, protocol: str = PROTOCOL) -> bytes:
    return field(1, call) + field(3, field(1, b"") + field(2, protocol.encode()) + field(3, data))


def reply_envelope(call: bytes, data: bytes) -> bytes:
    return field(1, call) + field(4, field(1, data))


def error_envelope(call: bytes, text: str) -> bytes:
    return field(1, call) + field(4, field(2, text.encode()))


# Frames


def frame(payload: bytes, is_local: bool) -> bytes:
    return (struct.pack("<I", len(payload)) if is_local else varint(len(payload))) + payload


def read_frame(sock: socket.socket, is_local: bool) -> bytes:
    if is_local:
        (length,) = struct.unpack("<I", exactly(sock, 4))
        return exactly(sock, length)
    length = shift = 0
    while True:
        (byte,) = exactly(sock, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    assert length <= FRAME_MAX, length
    return exactly(sock, length)


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise Closed()
        data += part
    return bytes(data)


def exchange(address: str, is_local: bool, data: bytes, source: str = None) -> dict:
    """One call, on a connection of its own: what the reply says."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 120, (source, 0) if source else None) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_local:
            sock.sendall(frame(data, True))
            return unpack(read_frame(sock, True))
        call = os.urandom(16)
        sock.sendall(frame(call_envelope(call, data), False))
        answer = fields(read_frame(sock, False))
        assert answer[1] == call, "the reply is to another call"
        answer = fields(answer[4])
        if 2 in answer:
            return {"session_id": 0, "shape": [], "data": b"", "error": answer[2].decode(), "in": "envelope"}
        return unpack(answer[1])
