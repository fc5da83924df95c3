"""A node of hivemind's DHT as a registry: store and find, and where peers can be reached. Each connection is one stream of libp2p, from the negotiation of its
protocol on; encryption and multiplexing are before it. Prints `listening PORT`, and then each record that comes, as JSON."""

import argparse
import hashlib
import json
import socket
import struct
import sys
import time

import wire

PROTOCOLS = ("DHTProtocol.rpc_store", "DHTProtocol.rpc_find")
KADEMLIA = "/ipfs/kad/1.0.0"
TUPLE, DICTIONARY = 0x40, 0x50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", default="[]", help="JSON: servers that have announced themselves before")
    parser.add_argument("--addresses", default="{}", help="JSON: ids of peers and lists of addresses, all as hexadecimal digits")
    parser.add_argument("--lie", help="what to do wrong")
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    print("listening", listener.getsockname()[1], flush=True)
    records = {}
    for record in json.loads(options.records):
        value = server(record) if "raw" not in record else bytes.fromhex(record["raw"])
        store(records, key_of(record["key"]), record["peer"], value, time.time() + record["expires_in"])
    while True:
        sock, _ = listener.accept()
        with sock:
            try:
                serve(sock, records, options)
            except (wire.Closed, OSError):
                pass


def key_of(name: str) -> bytes:
    return hashlib.sha1(wire.pack(name)).digest()


def server(record: dict) -> bytes:
    fields = {"start_block": record["start"], "end_block": record["end"], "version": record["version"], "vpk": None}
    return wire.pack(wire.Extension(TUPLE, wire.pack([record["state"], record["throughput"], fields])))


def store(records: dict, key: bytes, subkey, value: bytes, expiration: float) -> bool:
    known = records.setdefault(key, {})
    if expiration <= time.time() or subkey in known and expiration <= known[subkey][1]:
        return False
    known[subkey] = (value, expiration)
    return True


def serve(sock: socket.socket, records: dict, options: argparse.Namespace) -> None:
    assert line(sock) == "/multistream/1.0.0"
    send_line(sock, "/multistream/1.0.0")
    protocol = line(sock)
    if protocol == KADEMLIA:
        send_line(sock, protocol)
        return sock.sendall(wire.frame(closer_peers(json.loads(options.addresses), wire.read_frame(sock, False)), False))
    if protocol not in PROTOCOLS or options.lie == "na":
        return send_line(sock, "na")
    send_line(sock, protocol)
    envelope = wire.fields(wire.read_frame(sock, False))
    call, body = envelope[1], wire.fields(envelope[3])
    assert len(call) == 16 and body[2].decode() == protocol and len(body[1]) > 30, body
    if options.lie == "error":
        return sock.sendall(wire.frame(wire.error_envelope(call, "no such method"), False))
    if options.lie == "garbage":
        return sock.sendall(wire.frame(wire.reply_envelope(call, b"\xff\xff"), False))
    if options.lie == "flags":
        return sock.sendall(wire.frame(wire.reply_envelope(call, wire.field(2, b"\1")), False))
    if options.lie == "close":
        return None
    answer = (stored if protocol == PROTOCOLS[0] else found)(records, body[3])
    sock.sendall(wire.frame(wire.reply_envelope(call, answer), False))


def stored(records: dict, request: bytes) -> bytes:
    parts = repeated(request)
    keys, subkeys, values = parts[2], parts[3], parts[4]
    (expirations,), (in_cache,) = parts[5], parts[6]
    expirations = struct.unpack(f"<{len(keys)}d", expirations)
    assert len(subkeys) == len(values) == len(in_cache) == len(keys) and not any(in_cache)
    (auth,) = parts[1]
    assert abs(struct.unpack("<d", dict(numbers(auth))[3])[0] - time.time()) < 3600
    assert 7 not in parts, "a client is no node"
    accepted = []
    for key, subkey, value, expiration in zip(keys, subkeys, values, expirations):
        subkey = wire.unpack(subkey)
        assert isinstance(subkey, str)
        accepted.append(store(records, key, subkey, value, expiration))
        lifetime = round(expiration - time.time())
        print(json.dumps({"key": key.hex(), "subkey": subkey, "lifetime": lifetime, "value": plain(value)}), flush=True)
    return wire.field(2, bytes(accepted))


def plain(value: bytes):
    """A value as JSON: a server is a list, a model a map."""
    value = wire.unpack(value)
    if isinstance(value, wire.Extension):
        assert value.kind == TUPLE
        value = wire.unpack(value.data)
    return value


def found(records: dict, request: bytes) -> bytes:
    out = b""
    for key in repeated(request)[2]:
        assert len(key) == 20
        known = records.get(key)
        result = b""
        if known:
            latest = max(expiration for _, expiration in known.values())
            entries = [[subkey, value, expiration] for subkey, (value, expiration) in known.items()]
            value = wire.pack(wire.Extension(DICTIONARY, wire.pack([None, latest, entries])))
            result = b"\x08\x02" + wire.field(2, value) + b"\x19" + struct.pack("<d", latest)
        nearest = wire.field(4, bytes(20)) + wire.field(5, b"peer")
        out += wire.field(2, result + nearest)
    return wire.field(1, b"") + out + wire.field(3, wire.field(1, bytes(20)))


def closer_peers(addresses: dict, request: bytes) -> bytes:
    """The peers closest to the key of a request; here, all."""
    fields = dict(numbers(request))
    assert fields[1] == 4 and len(fields[2]) > 30, "FIND_NODE"
    out = b"\x08\x04"
    for peer, known in addresses.items():
        listed = b"".join(wire.field(2, bytes.fromhex(address)) for address in known)
        out += wire.field(8, wire.field(1, bytes.fromhex(peer)) + listed + b"\x18\x01")
    return out


def numbers(message: bytes) -> list:
    """The fields of a message, with 64-bit numbers as bytes."""
    fields, at = [], 0
    while at < len(message):
        tag, at = wire.varint_at(message, at)
        if tag & 7 == 0:
            value, at = wire.varint_at(message, at)
            fields.append((tag >> 3, value))
            continue
        if tag & 7 == 2:
            length, at = wire.varint_at(message, at)
        elif tag & 7 == 1:
            length = 8
        else:
            raise ValueError(tag)
        fields.append((tag >> 3, message[at : at + length]))
        at += length
    assert at == len(message)
    return fields


def repeated(message: bytes) -> dict:
    found = {}
    for number, value in numbers(message):
        found.setdefault(number, []).append(value)
    return found


def line(sock: socket.socket) -> str:
    (length,) = wire.exactly(sock, 1)
    text = wire.exactly(sock, length)
    assert length < 0x80 and text.endswith(b"\n"), text
    return text[:-1].decode()


def send_line(sock: socket.socket, text: str) -> None:
    sock.sendall(bytes([len(text) + 1]) + text.encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print("error", repr(error), flush=True)
        sys.exit(1)
