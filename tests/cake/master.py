"""A cake master. Runs the first and the last layers itself and prints the tokens of each generation as JSON."""

import argparse
import json
import os
import socket
import struct
import sys

import protocol as p
from layers import Model, Sequence


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", help="host:port")
    parser.add_argument("--discover", type=int, help="find the worker by asking this UDP port of this host")
    parser.add_argument("--key")
    parser.add_argument("--model", required=True)
    parser.add_argument("--remote", required=True, help="A-B: the worker's layers, inclusive")
    parser.add_argument("--setup", action="store_true", help="assign the layers first, and send the files")
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--compress", action="store_true", help="send files as zstd frames")
    parser.add_argument("--dtype", default="F32")
    parser.add_argument("--single", action="store_true", help="a message for each layer")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("prompts", help="JSON: lists of tokens")
    options = parser.parse_args()
    model = Model(options.model)
    first, last = map(int, options.remote.split("-"))
    names = [f"model.layers.{layer}" for layer in range(model.config["num_hidden_layers"])]
    worker = options.worker or discover(options.discover, options.key)
    if options.setup:
        set_up(worker, names[first : last + 1], options)
    # One connection for each layer, of which only the first one works.
    links = [greet(worker, options.key) for _ in range(first, last + 1)]
    for prompt in json.loads(options.prompts):
        print(json.dumps(generate(model, names, first, last, links[0], prompt, options)), flush=True)
        for link in links:
            p.send(link, p.u32(p.GOODBYE))
            assert p.read_frame(link).tag == p.WORKER_INFO
    for link in links:
        link.close()


def discover(port: int, key: str) -> str:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(60)
    cluster = p.short_hash(key.encode())
    sock.sendto(b"CAKE" + json.dumps({"cluster_hash": cluster}).encode(), ("127.0.0.1", port))
    answer, (host, _) = sock.recvfrom(65535)
    assert answer[:4] == b"CAKE"
    answer = json.loads(answer[4:])
    assert answer["cluster_hash"] == cluster and answer["worker_name"] and answer["gpus"], answer
    for gpu in answer["gpus"]:
        assert isinstance(gpu["name"], str) and gpu["vram_bytes"] > 0 and isinstance(gpu["tflops"], (int, float))
    return f"{host}:{answer['port']}"


def set_up(worker: str, layers: list, options: argparse.Namespace) -> None:
    sock = p.connect(worker, options.key)
    with open(os.path.join(options.model, "config.json"), "rb") as file:
        model_hash = p.short_hash(file.read())
    p.send(sock, p.assignment(layers, model_hash))
    answer = p.read_frame(sock)
    assert answer.tag == p.ACK, fail(answer)
    needs_data = answer.u8()
    print("needs data" if needs_data else "has data", file=sys.stderr, flush=True)
    if needs_data:
        for name in ["config.json", "tokenizer.json", *weights(options.model, layers)]:
            send_file(sock, name, options)
        p.send(sock, p.u32(p.DONE))
    answer = p.read_frame(sock)
    assert answer.tag == p.READY[options.older] and answer.left() == 0, fail(answer)
    sock.close()


def weights(folder: str, layers: list) -> list:
    """The names of the files to send: an index and the shards that it names, or the one file."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return ["model.safetensors"]
    with open(index, encoding="utf-8") as file:
        mapped = json.load(file)["weight_map"]
    shards = {shard for tensor, shard in mapped.items() if any(tensor.startswith(f"{layer}.") for layer in layers)}
    return ["model.safetensors.index.json", *sorted(shards)]


def send_file(sock: socket.socket, name: str, options: argparse.Namespace) -> None:
    with open(os.path.join(options.model, name), "rb") as file:
        content = file.read()
    # Small chunks, so that there are several.
    size = 100_000
    for offset in range(0, len(content), size):
        data = content[offset : offset + size]
        data = zstd_frame(data) if options.compress else data
        p.send(sock, p.chunk(name, offset, len(content), data, options.older, options.compress))


def zstd_frame(data: bytes) -> bytes:
    """A zstd frame of one raw block: valid, if not smaller."""
    assert len(data) <= 128 << 10
    # No checksum, no size; a window of 128 KiB; the header of the last block, which is raw.
    return bytes([0x28, 0xB5, 0x2F, 0xFD, 0x00, 0x38]) + struct.pack("<I", len(data) << 3 | 1)[:3] + data


def fail(message: p.Reader) -> str:
    return f"message {message.tag}: {message.payload[:200]!r}"


def greet(worker: str, key: str | None) -> socket.socket:
    sock = p.connect(worker, key)
    p.send(sock, p.u32(p.HELLO))
    info = p.read_frame(sock)
    assert info.tag == p.WORKER_INFO
    [info.text() for _ in range(5)], info.u64(), info.take(16)
    return sock


def generate(model: Model, names: list, first: int, last: int, link, prompt: list, options) -> list:
    own = Sequence(model)
    tokens, position, out = prompt, 0, []
    while len(out) < options.tokens:
        rows = own.run(names[:first], [model.embed(token) for token in tokens], position)
        rows = ask(link, rows, names, range(first, last + 1), position, options)
        rows = own.run(names[last + 1 :], rows, position)
        position += len(tokens)
        logits = model.logits(rows[-1])
        tokens = [logits.index(max(logits))]
        out += tokens
    return out


def ask(link: socket.socket, rows: list, names: list, layers: range, position: int, options) -> list:
    ops = [(names[layer], position, layer) for layer in layers]
    if not options.single:
        return exchange(link, p.batch(p.tensor_of(options.dtype, rows), ops), len(rows), options.dtype)
    assert len(ops) == 1, "a message for each layer needs a sequence for each"
    return exchange(link, p.single_op(p.tensor_of(options.dtype, rows), ops[0]), len(rows), options.dtype)


def exchange(link: socket.socket, message: bytes, count: int, expected: str) -> list:
    p.send(link, message)
    answer = p.read_frame(link)
    assert answer.tag == p.TENSOR, fail(answer)
    dtype, shape, data = answer.tensor()
    assert dtype == expected and shape[1] == count, (dtype, shape)
    return p.rows_of(dtype, shape, data)


if __name__ == "__main__":
    main()
