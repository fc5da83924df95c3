"""A cake worker. Prints `listening PORT`, and serves until it is ended."""

import argparse
import os
import re
import socket
import struct
import threading
import time
import zlib

import protocol as p
from layers import Model, Sequence

SENT = re.compile(r"config\.json|tokenizer\.json|model\.safetensors\.index\.json|[A-Za-z0-9_.-]+\.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--key")
    parser.add_argument("--model", help="a folder with weights; without it a master has to set this worker up")
    parser.add_argument("--cache", help="where files from a master go")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dtype", default="F32")
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--lie", help="what to do wrong once work comes")
    parser.add_argument("--lies", type=int, default=1 << 30, help="how often")
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", options.port))
    print("listening", listener.getsockname()[1], flush=True)
    model = Model(options.model) if options.model else set_up(listener, options)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock, model, options), daemon=True).start()


def set_up(listener: socket.socket, options: argparse.Namespace) -> Model:
    """One connection: layers are assigned, files come."""
    sock, _ = listener.accept()
    assert p.accept(sock, options.key), "the master has another key"
    message = p.read_frame(sock)
    assert message.tag == p.ASSIGNMENT, message.tag
    layers = [message.text() for _ in range(message.u32())]
    model_hash = message.text()
    folder = os.path.join(options.cache, model_hash)
    needs_data = not os.path.exists(os.path.join(folder, "config.json"))
    p.send(sock, p.u32(p.ACK) + bytes([needs_data]))
    if needs_data:
        os.makedirs(folder)
        sizes = {}
        while (message := p.read_frame(sock)).tag == p.CHUNK:
            name, offset, total = message.text(), message.u64(), message.u64()
            if not options.older:
                compressed, checksum = message.u8(), message.u32()
            data = message.bytes()
            assert message.left() == 0, "bytes follow the chunk"
            if not options.older:
                assert checksum == zlib.crc32(data) and not compressed
            assert SENT.fullmatch(name) and sizes.get(name, 0) == offset, (name, offset)
            sizes[name] = offset + len(data)
            with open(os.path.join(folder, name), "ab") as file:
                file.write(data)
        assert message.tag == p.DONE, message.tag
        with open(os.path.join(folder, "config.json"), "rb") as file:
            assert p.short_hash(file.read()) == model_hash
    model = Model(folder)
    assert all(model.has_layer(layer) for layer in layers), layers
    print("set up", len(layers), "needs data" if needs_data else "has data", flush=True)
    p.send(sock, p.u32(p.READY[options.older]))
    sock.close()
    return model


def serve(sock: socket.socket, model: Model, options: argparse.Namespace) -> None:
    try:
        if not p.accept(sock, options.key) or p.read_frame(sock).tag != p.HELLO:
            return
        p.send(sock, p.worker_info(options.dtype))
        sequence = Sequence(model)
        while True:
            message = p.read_frame(sock)
            if message.tag == p.GOODBYE:
                sequence = Sequence(model)
                p.send(sock, p.worker_info(options.dtype))
            elif message.tag == p.BATCH:
                dtype, shape, data = message.tensor()
                assert dtype == options.dtype, dtype
                answer(sock, model, sequence, p.rows_of(dtype, shape, data), message.ops(), options)
            else:
                return
    except (p.Closed, OSError):
        pass
    finally:
        sock.close()


def answer(sock, model: Model, sequence: Sequence, rows: list, ops: list, options: argparse.Namespace) -> None:
    names, positions = [name for name, _, _ in ops], {position for _, position, _ in ops}
    unknown = [name for name in names if not model.has_layer(name)]
    if unknown or len(positions) != 1:
        p.send(sock, p.u32(p.ERROR[options.older]) + p.text(f"cannot run {unknown or positions}"))
        return
    position = positions.pop()
    rows = sequence.run(names, rows, position)
    # Lies begin after the prompt, when there is something to lose.
    if options.lie and position > 0 and options.lies > 0:
        options.lies -= 1
        lie(sock, options.lie, rows, options.dtype)
        return
    p.send(sock, p.u32(p.TENSOR) + p.tensor_of(options.dtype, rows))


def lie(sock: socket.socket, kind: str, rows: list, dtype: str) -> None:
    hidden = len(rows[0])
    whole = p.tensor_of(dtype, rows)
    if kind == "silent":
        time.sleep(3600)
    elif kind == "close":
        sock.shutdown(socket.SHUT_RDWR)
    elif kind == "garbage":
        sock.sendall(os.urandom(4096))
    elif kind == "error":
        p.send(sock, p.u32(p.ERROR[False]) + p.text("out of memory"))
    elif kind == "older-error":
        p.send(sock, p.u32(p.ERROR[True]) + p.text("out of memory"))
    elif kind == "cut":
        sock.sendall(p.frame(p.u32(p.TENSOR) + whole)[:40])
        sock.shutdown(socket.SHUT_RDWR)
    elif kind == "huge":
        sock.sendall(struct.pack(">II", p.MAGIC, p.FRAME_MAX))
    elif kind == "nan":
        p.send(sock, p.u32(p.TENSOR) + p.tensor_of(dtype, [[float("nan")] * hidden for _ in rows]))
    elif kind == "rows":
        p.send(sock, p.u32(p.TENSOR) + p.tensor_of(dtype, rows + rows))
    elif kind == "width":
        p.send(sock, p.u32(p.TENSOR) + p.tensor_of(dtype, [row[:-1] for row in rows]))
    elif kind == "shape":
        p.send(sock, p.u32(p.TENSOR) + p.tensor(dtype, [1, 1 << 62, hidden], p.pack(dtype, rows[0])))
    elif kind == "hello":
        p.send(sock, p.u32(p.HELLO))
    else:
        raise ValueError(kind)


main()
