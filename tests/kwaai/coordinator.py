"""A coordinator of KwaaiNet: hub and spoke over block servers. Prints tokens and logits of each prompt as a line of JSON."""

import argparse
import json
import os

import wire


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", action="append", required=True, help="host:port of a server, in the order of blocks")
    parser.add_argument("--local", action="store_true", help="the servers speak the local TCP bypass")
    parser.add_argument("--bin", action="store_true", help="send data as binaries, not as integers")
    parser.add_argument("--chunk", type=int, default=1 << 30, help="tokens of the prompt that are sent at once")
    parser.add_argument("--twice", action="store_true", help="send each call again, as after a lost reply")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("prompts", help="JSON: lists of tokens")
    options = parser.parse_args()
    for prompt in json.loads(options.prompts):
        tokens, logits = generate(options, prompt)
        print(json.dumps({"tokens": tokens, "logits": logits}), flush=True)


def generate(options: argparse.Namespace, prompt: list) -> tuple:
    session = int.from_bytes(os.urandom(8), "big")
    position, answer, rows = 0, [], []
    for start in range(0, len(prompt), options.chunk):
        chunk = prompt[start : start + options.chunk]
        logits = forward(options, session, position, chunk)
        position += len(chunk)
    while True:
        rows.append(logits)
        answer.append(max(range(len(logits)), key=logits.__getitem__))
        if len(answer) == options.tokens:
            return answer, rows
        logits = forward(options, session, position, answer[-1:])
        position += 1


def forward(options: argparse.Namespace, session: int, position: int, tokens: list) -> list:
    data = wire.tokens_request(session, position, tokens, not options.bin)
    for shard in options.shard:
        for _ in range(1 + options.twice):
            reply = wire.exchange(shard, options.local, data)
            assert reply["error"] is None, reply["error"]
            assert reply["session_id"] == session
        data = wire.request(session, position, "hidden_states", reply["shape"], bytes(reply["data"]), not options.bin)
        if reply["response_type"] == "hidden_states":
            assert reply["shape"][:2] == [1, len(tokens)], reply["shape"]
    assert reply["response_type"] == "logits" and reply["shape"][:2] == [1, 1], (reply["response_type"], reply["shape"])
    logits = wire.of_f16(bytes(reply["data"]))
    assert [len(logits)] == reply["shape"][2:]
    return logits


main()
