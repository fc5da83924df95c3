"""Decoder layers of the llama family (llama, qwen3), their embedding and head, for small models, in plain Python."""

import json
import math
import os
import re
import struct
from operator import mul

from protocol import unpack


class Model:
    """A folder with config.json and safetensors. Tensors are read when they are needed."""

    def __init__(self, folder: str):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.tensors = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                self._read(os.path.join(folder, name))
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.frequencies = frequencies(self.config, self.head_dim)

    def _read(self, path: str) -> None:
        with open(path, "rb") as file:
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            self.tensors[name] = (entry["dtype"], entry["shape"], content[8 + length + start : 8 + length + end])

    def get(self, name: str) -> list:
        """A vector, or the rows of a matrix."""
        dtype, shape, data = self.tensors[name]
        if not isinstance(data, list):
            values = unpack(dtype, data)
            if len(shape) == 2:
                values = [values[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
            self.tensors[name] = (dtype, shape, data := values)
        return data

    def has_layer(self, name: str) -> bool:
        return re.fullmatch(r"model\.layers\.\d+", name) is not None and f"{name}.input_layernorm.weight" in self.tensors

    def embed(self, token: int) -> list:
        return list(self.get("model.embed_tokens.weight")[token])

    def logits(self, row: list) -> list:
        tied = self.config.get("tie_word_embeddings")
        head = self.get("model.embed_tokens.weight" if tied else "lm_head.weight")
        return times(head, norm(row, self.get("model.norm.weight"), self.config["rms_norm_eps"]))

    def layer(self, name: str, row: list, position: int, cache: list) -> list:
        """Runs one layer on a row. The cache gets the row's key and value."""
        eps, dim = self.config["rms_norm_eps"], self.head_dim
        weight = lambda part: self.get(f"{name}.{part}.weight")
        x = norm(row, weight("input_layernorm"), eps)
        queries, keys, values = (split(times(weight(f"self_attn.{part}_proj"), x), dim) for part in "qkv")
        if f"{name}.self_attn.q_norm.weight" in self.tensors:
            queries = [norm(query, weight("self_attn.q_norm"), eps) for query in queries]
            keys = [norm(key, weight("self_attn.k_norm"), eps) for key in keys]
        queries = [rotate(query, position, self.frequencies) for query in queries]
        keys = [rotate(key, position, self.frequencies) for key in keys]
        assert len(cache) == position, f"position {position} with {len(cache)} cached"
        cache.append((keys, values))
        attended = []
        for head, query in enumerate(queries):
            group = head * self.kv_heads // self.heads
            scores = [dot(query, keys[group]) / math.sqrt(dim) for keys, _ in cache]
            weights = softmax(scores)
            attended += [
                sum(share * values[group][index] for share, (_, values) in zip(weights, cache)) for index in range(dim)
            ]
        row = add(row, times(weight("self_attn.o_proj"), attended))
        x = norm(row, weight("post_attention_layernorm"), eps)
        gate, up = times(weight("mlp.gate_proj"), x), times(weight("mlp.up_proj"), x)
        inner = [g / (1.0 + math.exp(-g)) * u for g, u in zip(gate, up)]
        return add(row, times(weight("mlp.down_proj"), inner))


class Sequence:
    """The K/V of one sequence in any layers."""

    def __init__(self, model: Model):
        self.model, self.caches = model, {}

    def run(self, names: list, rows: list, position: int) -> list:
        """Runs layers on rows from a position on."""
        for name in names:
            cache = self.caches.setdefault(name, [])
            rows = [self.model.layer(name, row, position + index, cache) for index, row in enumerate(rows)]
        return rows


def frequencies(config: dict, dim: int) -> list:
    base = [config["rope_theta"] ** (-2.0 * index / dim) for index in range(dim // 2)]
    scaling = config.get("rope_scaling")
    if not scaling:
        return base
    assert scaling["rope_type"] == "llama3", scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]

    def scaled(frequency: float) -> float:
        turns = context * frequency / (2.0 * math.pi)
        if turns < low:
            return frequency / factor
        if turns > high:
            return frequency
        smooth = (turns - low) / (high - low)
        return (1.0 - smooth) * frequency / factor + smooth * frequency

    return [scaled(frequency) for frequency in base]


def rotate(head: list, position: int, inverse: list) -> list:
    half = len(head) // 2
    out = [0.0] * len(head)
    for index, frequency in enumerate(inverse):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        a, b = head[index], head[index + half]
        out[index], out[index + half] = a * cos - b * sin, b * cos + a * sin
    return out


def norm(row: list, weight: list, eps: float) -> list:
    scale = 1.0 / math.sqrt(dot(row, row) / len(row) + eps)
    return [value * scale * factor for value, factor in zip(row, weight)]


def softmax(scores: list) -> list:
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    total = sum(shares)
    return [share / total for share in shares]


def split(values: list, size: int) -> list:
    return [values[start : start + size] for start in range(0, len(values), size)]


def dot(a: list, b: list) -> float:
    return sum(map(mul, a, b))


def times(matrix: list, x: list) -> list:
    return [dot(row, x) for row in matrix]


def add(a: list, b: list) -> list:
    return [x + y for x, y in zip(a, b)]
