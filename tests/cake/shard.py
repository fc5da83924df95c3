"""Copies a model's folder with its weights in one file for each layer, and one for the rest, and an index."""

import json
import os
import shutil
import struct
import sys


def main(folder: str, out: str) -> None:
    for name in ["config.json", "tokenizer.json"]:
        shutil.copy(os.path.join(folder, name), out)
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    groups = {}
    for tensor in header:
        parts = tensor.split(".")
        groups.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(tensor)
    weight_map = {}
    for number, group in enumerate(sorted(groups), 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        data, own = b"", {}
        for tensor in groups[group]:
            start, end = header[tensor]["data_offsets"]
            own[tensor] = {**header[tensor], "data_offsets": [len(data), len(data) + end - start]}
            data += content[8 + length + start : 8 + length + end]
            weight_map[tensor] = name
        text = json.dumps(own).encode()
        with open(os.path.join(out, name), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(out, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)


main(*sys.argv[1:])
