"""What a hostile peer would try on a worker. After each attempt the worker has to serve an honest master."""

import argparse
import json
import os
import socket
import struct

import protocol as p
from master import greet, zstd_frame

LAYERS = ["model.layers.0", "model.layers.1"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True, help="the model that the worker has, for the attempts on its sequences")
    parser.add_argument("--positions", type=int, default=400, help="how many tokens a sequence may have")
    parser.add_argument("--setup", action="store_true", help="attempts on the set-up of a worker that has no model")
    options = parser.parse_args()
    attempts = SETUP if options.setup else HANDSHAKES + FRAMES + WORK
    for attempt in attempts:
        attempt(options)
        link = greet(options.worker, options.key)
        p.send(link, p.u32(p.GOODBYE))
        assert p.read_frame(link).tag == p.WORKER_INFO
        link.close()
        print("refused:", attempt.__name__, flush=True)


def raw(options: argparse.Namespace) -> socket.socket:
    return p.connect(options.worker, None)


def closed(sock: socket.socket) -> None:
    """The worker closes the connection without an answer."""
    try:
        assert sock.recv(1) == b"", "the worker answered"
    except ConnectionResetError:
        pass
    sock.close()


# Handshakes.


def reflected_nonce(options) -> None:
    first, second = raw(options), raw(options)
    first.sendall(os.urandom(32))
    challenge = p.read_exact(first, 64)[32:]
    second.sendall(challenge)
    closed(second)
    first.sendall(os.urandom(32))
    closed(first)


def replayed_proof(options) -> None:
    sock = raw(options)
    sock.sendall(os.urandom(32))
    proof = p.read_exact(sock, 64)[:32]
    sock.sendall(proof)
    closed(sock)


def other_key(options) -> None:
    sock = raw(options)
    sock.sendall(os.urandom(32))
    sock.sendall(p.mac(options.key + "x", p.read_exact(sock, 64)[32:]))
    closed(sock)


def silent_strangers(options) -> None:
    """More than the worker lets wait: the honest master is let in all the same."""
    options.strangers = [raw(options) for _ in range(100)]


def no_key(options) -> None:
    """A master without a key, whose hello is too short for a nonce: nobody waits for ever."""
    sock = raw(options)
    p.send(sock, p.u32(p.HELLO))
    closed(sock)
    for stranger in options.strangers:
        closed(stranger)


HANDSHAKES = [reflected_nonce, replayed_proof, other_key, silent_strangers, no_key]


# Frames.


def frame_attack(name: str, content: bytes, hello: bool = True):
    def attempt(options) -> None:
        sock = greet(options.worker, options.key) if hello else p.connect(options.worker, options.key)
        sock.sendall(content)
        closed(sock)

    attempt.__name__ = name
    return attempt


def long_frame_that_never_comes(options) -> None:
    options.held = [greet(options.worker, options.key) for _ in range(8)]
    for sock in options.held:
        sock.sendall(struct.pack(">II", p.MAGIC, 1 << 20) + bytes(100))


def raw_tensor(dtype: int, shape: list, data: bytes) -> bytes:
    return p.blob(data) + bytes([dtype]) + p.u32(len(shape)) + b"".join(map(p.u64, shape))


def work(x: bytes) -> bytes:
    return p.frame(p.batch(x, [(layer, 0, index) for index, layer in enumerate(LAYERS)]))


FRAMES = [
    frame_attack("other protocol", b"GET / HTTP/1.1\r\n\r\n"),
    frame_attack("too long a frame", struct.pack(">II", p.MAGIC, p.FRAME_MAX + 1)),
    frame_attack("a frame longer than any work", struct.pack(">II", p.MAGIC, p.FRAME_MAX)),
    frame_attack("too long an assignment", struct.pack(">II", p.MAGIC, 64 << 20), hello=False),
    frame_attack("an empty message", p.frame(b"")),
    frame_attack("an unknown message", p.frame(p.u32(99))),
    frame_attack("a message that is not due", p.frame(p.u32(p.DONE))),
    frame_attack("a chunk without set-up", p.frame(p.chunk("config.json", 0, 1, b"x", False)), hello=False),
    frame_attack("work without a hello", work(raw_tensor(5, [1, 1, 64], bytes(256))), hello=False),
    frame_attack("bytes that are not whole elements", work(raw_tensor(4, [1, 1, 64], bytes(127)))),
    frame_attack("too few bytes", work(raw_tensor(5, [1, 2, 64], bytes(256)))),
    frame_attack("a product that overflows", work(raw_tensor(5, [1 << 32, 1 << 32, 64], b""))),
    frame_attack("a type that does not exist", work(raw_tensor(255, [1, 1, 64], bytes(256)))),
    frame_attack("many dimensions", work(raw_tensor(5, [1] * 64, bytes(4)))),
    frame_attack("a count that lies", p.frame(p.u32(p.BATCH) + raw_tensor(5, [1], bytes(4)) + p.u32(0xFFFFFFFF))),
    frame_attack("data that is cut off", p.frame(p.u32(p.BATCH) + p.u32(0x7FFFFFFF) + bytes(16))),
    long_frame_that_never_comes,
]


# Work that can be read, and cannot be done: an error comes back and the connection stays usable.


def work_attack(name: str, message: bytes):
    def attempt(options) -> None:
        sock = greet(options.worker, options.key)
        p.send(sock, message)
        answer = p.read_frame(sock)
        assert answer.tag == p.ERROR[False], answer.tag
        why = answer.text()
        assert why and len(why) < 2000, why
        p.send(sock, p.u32(p.GOODBYE))
        assert p.read_frame(sock).tag == p.WORKER_INFO
        sock.close()

    attempt.__name__ = name
    return attempt


def rows(count: int, value: float = 0.5) -> bytes:
    return p.tensor_of("F32", [[value] * 64] * count)


def ops(*layers: int, at: int = 0) -> list:
    return [(f"model.layers.{layer}", at, layer) for layer in layers]


def too_long_a_prompt(options) -> None:
    work_attack("too long a prompt", p.batch(rows(options.positions + 1), ops(0, 1)))(options)


WORK = [
    work_attack("no layers", p.batch(rows(1), [])),
    work_attack("layers of nobody", p.batch(rows(1), ops(0, 4000000))),
    work_attack("a layer that is a path", p.batch(rows(1), [("../../etc/passwd", 0, 0)])),
    work_attack("a part of an image model", p.single_op(rows(1), ("unet", 0, 0))),
    work_attack("a gap", p.batch(rows(1), ops(0, 2))),
    work_attack("backwards", p.batch(rows(1), ops(1, 0))),
    work_attack("two positions", p.batch(rows(1), [*ops(0), *ops(1, at=1)])),
    work_attack("a position that was not reached", p.batch(rows(1), ops(0, 1, at=7))),
    work_attack("an endless position", p.batch(rows(1), ops(0, 1, at=(1 << 64) - 1))),
    too_long_a_prompt,
    work_attack("another width", p.batch(p.tensor_of("F32", [[0.5] * 32]), ops(0, 1))),
    work_attack("another rank", p.batch(p.tensor("F32", [1, 64], bytes(256)), ops(0, 1))),
    work_attack("no rows", p.batch(p.tensor("F32", [1, 0, 64], b""), ops(0, 1))),
    work_attack("two batches", p.batch(p.tensor("F32", [2, 1, 64], bytes(512)), ops(0, 1))),
    work_attack("integers", p.batch(p.tensor("U32", [1, 1, 64], bytes(256)), ops(0, 1))),
    work_attack("not a number", p.batch(rows(1, float("nan")), ops(0, 1))),
    work_attack("infinity", p.batch(p.tensor("F16", [1, 1, 64], b"\x00\x7c" * 64), ops(0, 1))),
]


def rewind(options) -> None:
    """Work that continues at an earlier position replaces what came after it."""
    sock = greet(options.worker, options.key)
    values = [[(7 * row + column) % 11 / 11 for column in range(64)] for row in range(5)]

    def run(first: int, last: int) -> bytes:
        p.send(sock, p.batch(p.tensor_of("F32", values[first:last]), ops(0, 1, at=first)))
        answer = p.read_frame(sock)
        assert answer.tag == p.TENSOR, answer.payload[:100]
        return answer.tensor()[2]

    whole = run(0, 5)
    assert run(0, 5) == whole and run(2, 4) == whole[2 * 256 : 4 * 256] and run(4, 5) == whole[4 * 256 :]
    sock.close()


WORK.append(rewind)


# Set-up: the worker reports an error and keeps nothing.


def setup_attack(name: str, *messages: bytes, model_hash: str | None = None, layers: list | None = None):
    def attempt(options) -> None:
        sock = p.connect(options.worker, options.key)
        with open(os.path.join(options.model, "config.json"), "rb") as file:
            own_hash = p.short_hash(file.read())
        p.send(sock, p.assignment(LAYERS if layers is None else layers, own_hash if model_hash is None else model_hash))
        answer = p.read_frame(sock)
        if answer.tag == p.ACK:
            assert answer.u8() == 1, "the worker kept something"
            try:
                for message in messages:
                    p.send(sock, message(options) if callable(message) else message)
            except (ConnectionResetError, BrokenPipeError):
                pass
            answer = p.read_frame(sock)
        assert answer.tag in (p.ERROR[False], p.ERROR[True]), answer.tag
        print("  ", answer.text()[:120])
        sock.close()

    attempt.__name__ = name
    return attempt


def whole(name: str, content: bytes, **options) -> bytes:
    return p.chunk(name, 0, len(content), content, False, **options)


def config(options) -> bytes:
    with open(os.path.join(options.model, "config.json"), "rb") as file:
        return whole("config.json", file.read())


def part_of_weights(options) -> bytes:
    """A file of the announced size whose header promises more."""
    with open(os.path.join(options.model, "model.safetensors"), "rb") as file:
        return whole("model.safetensors", file.read()[:-1000])


def bomb() -> bytes:
    """A gigabyte of one repeated byte, in a few kilobytes."""
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"a"
    last = struct.pack("<I", (128 << 10) << 3 | 1 << 1 | 1)[:3] + b"a"
    return bytes([0x28, 0xB5, 0x2F, 0xFD, 0x00, 0x38]) + block * 8191 + last


DONE = p.u32(p.DONE)
PATHS = ["../evil", "../evil.safetensors", "/tmp/evil.safetensors", "a/evil.safetensors", "..", "evil\0.safetensors", "evil.sh"]
OTHER = json.dumps({"model_type": "llama"}).encode()

SETUP = [
    *[setup_attack(f"the name {path!r}", config, whole(path, b"x"), DONE) for path in PATHS],
    setup_attack("a hash that is a path", model_hash="../../x"),
    setup_attack("a long hash", model_hash="0" * 4000),
    setup_attack("layers that are paths", layers=["../../x"]),
    setup_attack("no layers of the model", config, part_of_weights, DONE, layers=["model.layers.900"]),
    setup_attack("another config.json", whole("config.json", OTHER), whole("model.safetensors", b"x"), DONE),
    setup_attack("a bomb", config, whole("model.safetensors", bomb(), compressed=True), DONE),
    setup_attack("no zstd frame", config, whole("model.safetensors", b"x" * 100, compressed=True), DONE),
    setup_attack("a frame that is cut", whole("config.json", zstd_frame(b"{}")[:-1], compressed=True), DONE),
    setup_attack("a wrong checksum", whole("config.json", b"{}", checksum=1), DONE),
    setup_attack("a file that is cut off", p.chunk("config.json", 0, 100, b"{}", False), DONE),
    setup_attack("a gap in a file", p.chunk("config.json", 50, 100, b"{}", False), DONE),
    setup_attack("a file of 2^63 bytes", p.chunk("model.safetensors", 0, 1 << 63, b"x", False), DONE),
    setup_attack("weights that are cut off", config, part_of_weights, DONE),
    setup_attack("no weights", config, DONE),
    setup_attack("nothing", DONE),
    setup_attack("a chunk in the older form that is cut off", p.chunk("config.json", 0, 100, b"{}", True), DONE),
]

main()
