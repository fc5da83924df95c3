"""A block server of KwaaiNet. Prints `listening PORT`, and serves until it is ended. As the original, it appends to a session
whatever comes."""

import argparse
import os
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../cake"))

import wire  # noqa: E402
from layers import Model, Sequence  # noqa: E402

LOCK = threading.Lock()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--blocks", required=True, help="A-B: from A up to and without B")
    parser.add_argument("--local", action="store_true", help="the local TCP bypass")
    parser.add_argument("--warm-up", type=int, default=0, help="calls that are told that the node is warming up")
    parser.add_argument("--busy", type=int, default=0, help="calls after these that are told that there is no room")
    parser.add_argument("--lie", help="what to do wrong after the first call that ran")
    options = parser.parse_args()
    model = Model(options.model)
    start, end = map(int, options.blocks.split("-"))
    names = [f"model.layers.{layer}" for layer in range(start, end)]
    is_last = end == model.config["num_hidden_layers"]
    state = {"model": model, "start": start, "names": names, "is_last": is_last, "sessions": {}, "calls": 0}
    listener = socket.create_server(("127.0.0.1", 0))
    print("listening", listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock, state, options), daemon=True).start()


def serve(sock: socket.socket, state: dict, options: argparse.Namespace) -> None:
    with sock:
        try:
            payload = wire.read_frame(sock, options.local)
            call, data = b"", payload
            if not options.local:
                envelope = wire.fields(payload)
                call, body = envelope[1], wire.fields(envelope[3])
                assert len(call) == 16 and body[2].decode() == wire.PROTOCOL and 1 in body
                data = body[3]
            with LOCK:
                answer(sock, call, wire.unpack(data), state, options)
        except (wire.Closed, OSError):
            pass


def answer(sock: socket.socket, call: bytes, request: dict, state: dict, options: argparse.Namespace) -> None:
    send = lambda data: sock.sendall(wire.frame(data if options.local else wire.reply_envelope(call, data), options.local))
    if options.warm_up > 0:
        options.warm_up -= 1
        return send(wire.failure("node warming up: 3 of 8 tensors"))
    if options.busy > 0:
        options.busy -= 1
        if options.local:
            return send(wire.failure("node at capacity"))
        return sock.sendall(wire.frame(wire.error_envelope(call, "node at capacity"), False))
    state["calls"] += 1
    if options.lie and state["calls"] > 1:
        return lie(sock, call, request, options, state["model"].config["vocab_size"])
    model, position = state["model"], request["seq_pos"]
    data = bytes(request["data"])
    if request["payload_type"] == "token_ids":
        if state["start"] != 0:
            return send(wire.failure(f"this shard has start_block {state['start']}, token ids need 0"))
        tokens = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
        rows = [model.embed(token) for token in tokens]
    else:
        _, count, width = request["shape"]
        values = wire.of_f16(data)
        assert len(values) == count * width
        rows = [values[row * width : (row + 1) * width] for row in range(count)]
    sequence = state["sessions"].setdefault(request["session_id"], Sequence(model))
    rows = sequence.run(state["names"], rows, position)
    session = request["session_id"]
    if state["is_last"]:
        logits = model.logits(rows[-1])
        return send(wire.reply(session, "logits", [1, 1, len(logits)], wire.f16(logits)))
    values = [value for row in rows for value in row]
    send(wire.reply(session, "hidden_states", [1, len(rows), len(rows[0])], wire.f16(values)))


def lie(sock: socket.socket, call: bytes, request: dict, options: argparse.Namespace, vocab: int) -> None:
    session, (_, count, width) = request["session_id"], request["shape"]
    zeros = lambda count, width, kind="hidden_states", of=session: wire.reply(
        of, kind, [1, count, width], wire.f16([0.0] * count * width)
    )
    envelope = lambda data, of=call: wire.frame(data if options.local else wire.reply_envelope(of, data), options.local)
    kind = options.lie
    if kind == "silent":
        time.sleep(3600)
    elif kind == "close":
        return
    elif kind == "garbage":
        sock.sendall(envelope(b"\xc1" * 64))
    elif kind == "cut":
        sock.sendall(envelope(zeros(count, width))[:40])
    elif kind == "huge":
        sock.sendall(b"\xff\xff\xff\x7f")
    elif kind == "nan":
        sock.sendall(envelope(wire.reply(session, "hidden_states", [1, count, width], b"\x00\x7e" * count * width)))
    elif kind == "rows":
        sock.sendall(envelope(zeros(count + 1, width)))
    elif kind == "width":
        sock.sendall(envelope(zeros(count, width - 1)))
    elif kind == "shape":
        sock.sendall(envelope(wire.reply(session, "hidden_states", [1, 1 << 31, 1 << 31, 4], b"")))
    elif kind == "session":
        sock.sendall(envelope(zeros(count, width, of=session ^ 1)))
    elif kind == "call":
        sock.sendall(envelope(zeros(count, width), bytes(16)))
    elif kind == "logits":
        sock.sendall(envelope(zeros(count, width, "logits")))
    elif kind == "nan-logits":
        sock.sendall(envelope(wire.reply(session, "logits", [1, 1, vocab], b"\x00\x7e" * vocab)))
    elif kind == "vocabulary":
        sock.sendall(envelope(zeros(1, vocab + 1, "logits")))
    elif kind == "states":
        sock.sendall(envelope(zeros(count, width)))
    elif kind == "error":
        sock.sendall(envelope(wire.failure("out of memory")))
    elif kind == "panicked":
        sock.sendall(envelope(wire.failure("forward pass panicked: index out of bounds")))
    else:
        raise ValueError(kind)


main()
