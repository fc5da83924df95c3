"""cake's wire protocol: frames, messages, tensors, authentication."""

import hashlib
import hmac
import os
import socket
import struct

MAGIC = 0x0104F4C7
FRAME_MAX = 512 << 20

(HELLO, WORKER_INFO, SINGLE_OP, BATCH, TENSOR, GOODBYE, ASSIGNMENT, ACK, CHUNK, DONE) = range(10)
# The last numbers differ: `older` selects the variant.
READY = {False: 11, True: 10}
ERROR = {False: 12, True: 11}

DTYPES = {"U8": (0, 1), "U32": (1, 4), "I64": (2, 8), "BF16": (3, 2), "F16": (4, 2), "F32": (5, 4), "F64": (6, 8)}
NAMES = {number: name for name, (number, _) in DTYPES.items()}


class Closed(Exception):
    """The other side closed the connection."""


def frame(payload: bytes) -> bytes:
    return struct.pack(">II", MAGIC, len(payload)) + payload


def read_exact(sock: socket.socket, count: int) -> bytes:
    parts = []
    while count > 0:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(sock: socket.socket) -> "Reader":
    magic, length = struct.unpack(">II", read_exact(sock, 8))
    assert magic == MAGIC and length <= FRAME_MAX, (hex(magic), length)
    return Reader(read_exact(sock, length))


class Reader:
    """Takes values off a payload. `tag` is the number of the message."""

    def __init__(self, payload: bytes):
        self.payload, self.at = payload, 0
        self.tag = self.u32()

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.payload), "the message is too short"
        self.at += count
        return self.payload[self.at - count : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def u8(self) -> int:
        return self.number(1)

    def u32(self) -> int:
        return self.number(4)

    def u64(self) -> int:
        return self.number(8)

    def bytes(self) -> bytes:
        return self.take(self.u32())

    def text(self) -> str:
        return self.bytes().decode()

    def left(self) -> int:
        return len(self.payload) - self.at

    def tensor(self):
        """(dtype name, shape, bytes)"""
        data, dtype = self.bytes(), NAMES[self.u8()]
        shape = [self.u64() for _ in range(self.u32())]
        return dtype, shape, data

    def ops(self):
        return [(self.text(), self.u64(), self.u64()) for _ in range(self.u32())]


def u32(value: int) -> bytes:
    return struct.pack(">I", value)


def u64(value: int) -> bytes:
    return struct.pack(">Q", value)


def text(value: str) -> bytes:
    return blob(value.encode())


def blob(value: bytes) -> bytes:
    return u32(len(value)) + value


def tensor(dtype: str, shape: list, data: bytes) -> bytes:
    return blob(data) + bytes([DTYPES[dtype][0]]) + u32(len(shape)) + b"".join(map(u64, shape))


def worker_info(dtype: str) -> bytes:
    texts = b"".join(map(text, ["0.1.0", dtype, "linux", "x86_64", "cpu"]))
    return u32(WORKER_INFO) + texts + u64(0) + bytes(16)


def batch(x: bytes, ops: list) -> bytes:
    return u32(BATCH) + x + u32(len(ops)) + b"".join(text(name) + u64(at) + u64(block) for name, at, block in ops)


def single_op(x: bytes, op: tuple) -> bytes:
    name, at, block = op
    return u32(SINGLE_OP) + text(name) + x + u64(at) + u64(block)


def assignment(layers: list, model_hash: str) -> bytes:
    return u32(ASSIGNMENT) + u32(len(layers)) + b"".join(map(text, layers)) + text(model_hash)


def chunk(name: str, offset: int, total: int, data: bytes, older: bool, compressed=False, checksum=None) -> bytes:
    import zlib

    check = b"" if older else bytes([compressed]) + u32(zlib.crc32(data) if checksum is None else checksum)
    return u32(CHUNK) + text(name) + u64(offset) + u64(total) + check + blob(data)


def send(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(frame(payload))


def connect(address: str, key: str | None) -> socket.socket:
    """A master's connection, authenticated."""
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if key is not None:
        nonce = os.urandom(32)
        sock.sendall(nonce)
        answer = read_exact(sock, 64)
        assert hmac.compare_digest(answer[:32], mac(key, nonce)), "the worker has another key"
        sock.sendall(mac(key, answer[32:]))
    return sock


def accept(sock: socket.socket, key: str | None) -> bool:
    """Authenticates a master."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if key is None:
        return True
    theirs, ours = read_exact(sock, 32), os.urandom(32)
    sock.sendall(mac(key, theirs) + ours)
    return hmac.compare_digest(read_exact(sock, 32), mac(key, ours))


def mac(key: str, nonce: bytes) -> bytes:
    return hmac.new(key.encode(), nonce, hashlib.sha256).digest()


def short_hash(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:8]


def pack(dtype: str, values: list) -> bytes:
    """Little-endian elements."""
    if dtype == "BF16":
        bits = (int.from_bytes(struct.pack("<f", value), "little") for value in values)
        # To the nearest, ties to even.
        return b"".join(struct.pack("<H", (word + 0x7FFF + ((word >> 16) & 1)) >> 16) for word in bits)
    return struct.pack(f"<{len(values)}{'e' if dtype == 'F16' else 'f'}", *values)


def unpack(dtype: str, data: bytes) -> list:
    if dtype == "BF16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    letter, size = ("e", 2) if dtype == "F16" else ("f", 4)
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


def rows_of(dtype: str, shape: list, data: bytes) -> list:
    """The rows of a tensor [1, rows, hidden]."""
    one, rows, hidden = shape
    assert one == 1 and len(data) == rows * hidden * DTYPES[dtype][1], (dtype, shape, len(data))
    values = unpack(dtype, data)
    return [values[row * hidden : (row + 1) * hidden] for row in range(rows)]


def tensor_of(dtype: str, rows: list) -> bytes:
    return tensor(dtype, [1, len(rows), len(rows[0])], pack(dtype, [value for row in rows for value in row]))
