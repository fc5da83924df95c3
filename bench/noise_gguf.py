"""Random-weight GGUF files in a real model's shape: a model too large for the cache, without a download.

The weights are noise, good for measuring speed and for nothing else. The tokenizer is taken from a real GGUF, raw,
and padded with unused tokens up to the vocabulary of the shape. Standard library only: one table of Gaussian noise,
repeated from another offset for each tensor. Its length is prime, so that no two rows of a matrix are equal.
"""

import array
import math
import random
import struct
from pathlib import Path

QWEN3_0_6B = {
    "arch": "qwen3", "layers": 28, "hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "vocab": 151936, "rope_base": 1e6, "eps": 1e-6, "context": 40960,
}  # fmt: skip

TABLE = 1048583  # prime
ALIGNMENT = 32
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TENSOR_F32, TENSOR_BF16 = 0, 30
TOKEN_UNUSED = 5


def write(path: Path, shape: dict, tokenizer_from: Path, seed: int = 1) -> None:
    """Writes `path` in bf16 (norms in f32), whole or not at all."""
    metadata = model_metadata(shape) | tokenizer_metadata(tokenizer_from, shape["vocab"])
    tensors = tensor_list(shape)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            out.write(packed_string(key) + value)
        offset = 0
        for name, dims, std in tensors:
            kind, size = (TENSOR_F32, 4) if std is None else (TENSOR_BF16, 2)
            out.write(packed_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
            offset = aligned(offset + size * math.prod(dims))
        out.write(bytes(aligned(out.tell()) - out.tell()))
        start = out.tell()
        rng = random.Random(seed)
        noise = [rng.gauss(0, 1) for _ in range(TABLE)]
        tables = {std: bf16_table(noise, std) for std in {std for *_, std in tensors} - {None}}
        for _, dims, std in tensors:
            count = math.prod(dims)
            if std is None:
                out.write(struct.pack("<f", 1.0) * count)
            else:
                repeat(out, tables[std], 2 * rng.randrange(TABLE), 2 * count)
            out.write(bytes(aligned(out.tell() - start) - (out.tell() - start)))
    part.rename(path)


def tensor_list(shape: dict) -> list[tuple[str, tuple[int, ...], float | None]]:
    """Every tensor as (name, dimensions with the innermost first, standard deviation or None for a norm)."""
    hidden, ffn, head_dim, layers = (shape[k] for k in ("hidden", "ffn", "head_dim", "layers"))
    q, kv = shape["heads"] * head_dim, shape["kv_heads"] * head_dim
    into, back = hidden**-0.5, lambda width: (2 * layers * width) ** -0.5
    tensors = [("token_embd.weight", (hidden, shape["vocab"]), 0.02), ("output_norm.weight", (hidden,), None)]
    for layer in range(layers):
        tensors += [
            (f"blk.{layer}.{name}.weight", dims, std)
            for name, dims, std in (
                ("attn_norm", (hidden,), None),
                ("attn_q", (hidden, q), into),
                ("attn_k", (hidden, kv), into),
                ("attn_v", (hidden, kv), into),
                ("attn_output", (q, hidden), back(q)),
                ("attn_q_norm", (head_dim,), None),
                ("attn_k_norm", (head_dim,), None),
                ("ffn_norm", (hidden,), None),
                ("ffn_gate", (hidden, ffn), into),
                ("ffn_up", (hidden, ffn), into),
                ("ffn_down", (ffn, hidden), back(ffn)),
            )
        ]
    return tensors


def model_metadata(shape: dict) -> dict[str, bytes]:
    arch = shape["arch"]
    u32 = lambda value: struct.pack("<II", U32, value)
    f32 = lambda value: struct.pack("<If", F32, value)
    text = lambda value: struct.pack("<I", STRING) + packed_string(value)
    return {
        "general.architecture": text(arch),
        "general.name": text("noise, for speed measurements only"),
        "general.file_type": u32(32),
        f"{arch}.block_count": u32(shape["layers"]),
        f"{arch}.context_length": u32(shape["context"]),
        f"{arch}.embedding_length": u32(shape["hidden"]),
        f"{arch}.feed_forward_length": u32(shape["ffn"]),
        f"{arch}.attention.head_count": u32(shape["heads"]),
        f"{arch}.attention.head_count_kv": u32(shape["kv_heads"]),
        f"{arch}.attention.key_length": u32(shape["head_dim"]),
        f"{arch}.attention.value_length": u32(shape["head_dim"]),
        f"{arch}.attention.layer_norm_rms_epsilon": f32(shape["eps"]),
        f"{arch}.rope.freq_base": f32(shape["rope_base"]),
        f"{arch}.rope.dimension_count": u32(shape["head_dim"]),
        f"{arch}.vocab_size": u32(shape["vocab"]),
    }


def tokenizer_metadata(path: Path, vocab: int) -> dict[str, bytes]:
    """The `tokenizer.` entries of a GGUF file as raw values, with tokens added up to `vocab`."""
    entries = {}
    with path.open("rb") as file:
        data = file.read(64 << 20)
    magic, _, _, count = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    at = 24
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        key = data[at + 8 : at + 8 + length].decode()
        at += 8 + length
        end = value_end(data, at)
        if key.startswith("tokenizer."):
            entries[key] = data[at:end]
        at = end
    known = struct.unpack_from("<Q", entries["tokenizer.ggml.tokens"], 8)[0]
    added = range(known, vocab)
    entries["tokenizer.ggml.tokens"] = extended(
        entries["tokenizer.ggml.tokens"], vocab, b"".join(packed_string(f"<|unused_{i}|>") for i in added)
    )
    entries["tokenizer.ggml.token_type"] = extended(
        entries["tokenizer.ggml.token_type"], vocab, struct.pack("<i", TOKEN_UNUSED) * len(added)
    )
    entries["tokenizer.ggml.add_bos_token"] = struct.pack("<IB", BOOL, 0)
    return entries


def value_end(data: bytes, at: int) -> int:
    """Where the value that starts at `at`, with its type, ends."""
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != ARRAY:
        return at + SCALAR_BYTES[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != STRING:
        return at + count * SCALAR_BYTES[kind]
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


def extended(value: bytes, count: int, more: bytes) -> bytes:
    """A raw array value that now holds `count` items, the last of them `more`."""
    return value[:8] + struct.pack("<Q", count) + value[16:] + more


def packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def bf16_table(noise: list[float], std: float) -> bytes:
    """The noise times `std` in bf16: the upper halves of the f32 values (rounding does not matter to noise)."""
    return array.array("H", array.array("f", (x * std for x in noise)).tobytes())[1::2].tobytes()


def repeat(out, table: bytes, start: int, length: int) -> None:
    """Writes `length` bytes of the endlessly repeated table, from `start` on."""
    while length:
        piece = table[start : start + length]
        out.write(piece)
        length, start = length - len(piece), 0


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
