"""llama.cpp as a peer, without a build: the shared libraries of npm's node-llama-cpp, driven through ctypes.

Run as a program it does one job in a process of its own, so that no thread and no memory outlives a measurement: one
JSON object as the only argument says what to do, one JSON object on standard output is the answer.

    {"job": "speed", "libs", "variant", "model", "threads", "prompt", "generate", "batches": [1, 8]}
    {"job": "greedy", "libs", "variant", "model", "threads", "tokens", "count"}    and the time to the first token
    {"job": "tokenize", "libs", "variant", "model", "texts"}
    {"job": "quantize", "libs", "variant", "model", "out", "type"}

`variant` is "auto" (llama.cpp chooses its best build for this CPU) or the name of one build, such as "haswell" for
AVX2. What is timed is llama_decode with a persistent thread pool, which is what llama-bench times; sampling is left
out.
"""

import ctypes as C
import json
import platform
import random
import re
import sys
import time
from pathlib import Path

FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
BATCH_MAX = 2048


class Opaque(C.Structure):
    """A parameter struct that is handed back as it came, but for the few fields that are written by position."""

    _fields_ = [("words", C.c_uint32 * 256)]


class Batch(C.Structure):
    _fields_ = [
        ("n_tokens", C.c_int32),
        ("token", C.POINTER(C.c_int32)),
        ("embd", C.c_void_p),
        ("pos", C.POINTER(C.c_int32)),
        ("n_seq_id", C.POINTER(C.c_int32)),
        ("seq_id", C.POINTER(C.POINTER(C.c_int32))),
        ("logits", C.POINTER(C.c_int8)),
    ]


LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
SILENCE = LOG(lambda *_: None)
PROTOTYPES = {
    "llama_log_set": (None, [LOG, C.c_void_p]),
    "llama_model_default_params": (Opaque, []),
    "llama_context_default_params": (Opaque, []),
    "llama_model_quantize_default_params": (Opaque, []),
    "llama_model_quantize": (C.c_uint32, [C.c_char_p, C.c_char_p, C.POINTER(Opaque)]),
    "llama_model_load_from_file": (C.c_void_p, [C.c_char_p, Opaque]),
    "llama_model_get_vocab": (C.c_void_p, [C.c_void_p]),
    "llama_vocab_n_tokens": (C.c_int32, [C.c_void_p]),
    "llama_tokenize": (
        C.c_int32,
        [C.c_void_p, C.c_char_p, C.c_int32, C.POINTER(C.c_int32), C.c_int32, C.c_bool, C.c_bool],
    ),
    "llama_init_from_model": (C.c_void_p, [C.c_void_p, Opaque]),
    "llama_attach_threadpool": (None, [C.c_void_p, C.c_void_p, C.c_void_p]),
    "llama_set_n_threads": (None, [C.c_void_p, C.c_int32, C.c_int32]),
    "llama_get_memory": (C.c_void_p, [C.c_void_p]),
    "llama_memory_clear": (None, [C.c_void_p, C.c_bool]),
    "llama_batch_init": (Batch, [C.c_int32, C.c_int32, C.c_int32]),
    "llama_decode": (C.c_int32, [C.c_void_p, Batch]),
    "llama_synchronize": (None, [C.c_void_p]),
    "llama_get_logits_ith": (C.POINTER(C.c_float), [C.c_void_p, C.c_int32]),
    "llama_print_system_info": (C.c_char_p, []),
}


class Library:
    """The loaded libraries; the CPU build that does the arithmetic is named by `variant`."""

    def __init__(self, folder: Path, variant: str):
        load = lambda pattern: C.CDLL(str(next(folder.glob(pattern))), mode=C.RTLD_GLOBAL)
        self.base = load("libggml-base.so*")
        ggml = load("libggml.*so*")
        self.llama = load("libllama.*so*")
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(self.llama, name)
            function.restype, function.argtypes = result, arguments
        self.llama.llama_log_set(SILENCE, None)
        if variant == "auto":
            ggml.ggml_backend_load_all_from_path(str(folder).encode())
        else:
            ggml.ggml_backend_load.restype = C.c_void_p
            if not ggml.ggml_backend_load(str(folder / f"libggml-cpu-{variant}.so").encode()):
                raise SystemExit(f"llama.cpp's {variant} build does not load on this CPU")
        self.llama.llama_backend_init()
        loaded = re.search(r"\S*/libggml-cpu-(\w+)\.so", Path("/proc/self/maps").read_text())
        if not loaded:
            raise SystemExit("llama.cpp found no CPU build that runs here")
        self.cpu, self.variant = C.CDLL(loaded[0]), loaded[1]

    def features(self) -> list[str]:
        """The instruction sets that the loaded build was compiled for."""
        return re.findall(r"(\w+) = 1", self.llama.llama_print_system_info().decode())


class Model:
    """A model with one context: `decode` runs (token, position, sequence) items as one batch."""

    def __init__(self, library: Library, path: str, threads: int, context: int, sequences: int):
        self.library, llama = library, library.llama
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = llama.llama_model_get_vocab(model)
        self.vocab_size = llama.llama_vocab_n_tokens(self.vocab)
        params = llama.llama_context_default_params()
        # The struct opens with n_ctx, n_batch, n_ubatch, n_seq_max, and these are their defaults.
        if list(params.words[:4]) != [512, 2048, 512, 1]:
            raise SystemExit("this llama.cpp has another parameter layout than the one this program knows")
        params.words[0], params.words[3] = max(context, BATCH_MAX), sequences
        self.context = llama.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        pool = Opaque()
        library.base.ggml_threadpool_params_init(C.byref(pool), threads)
        library.cpu.ggml_threadpool_new.restype = C.c_void_p
        self.pool = library.cpu.ggml_threadpool_new(C.byref(pool))
        llama.llama_attach_threadpool(self.context, self.pool, None)
        llama.llama_set_n_threads(self.context, threads, threads)
        self.batch = llama.llama_batch_init(BATCH_MAX, 0, sequences)

    def decode(self, items: list[tuple[int, int, int]], every_logit: bool) -> None:
        batch, llama = self.batch, self.library.llama
        batch.n_tokens = len(items)
        for i, (token, position, sequence) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = every_logit or i == len(items) - 1
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(self.context)

    def clear(self) -> None:
        self.library.llama.llama_memory_clear(self.library.llama.llama_get_memory(self.context), True)

    def best_two(self, row: int) -> tuple[int, float]:
        """The likeliest token after a row of the last batch, and its lead over the second in logits."""
        pointer = self.library.llama.llama_get_logits_ith(self.context, row)
        logits = pointer[: self.vocab_size]
        best = max(logits)
        token = logits.index(best)
        logits[token] = float("-inf")
        return token, best - max(logits)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        room = (C.c_int32 * (len(raw) + 8))()
        count = self.library.llama.llama_tokenize(self.vocab, raw, len(raw), room, len(room), False, True)
        return list(room[:count])


def speed(library: Library, job: dict) -> dict:
    prompt, generate, batches = job["prompt"], job["generate"], job["batches"]
    widest = max(batches)
    model = Model(library, job["model"], job["threads"], (prompt + generate + 64) * widest, widest)
    rng = random.Random(1)

    def prefill() -> float:
        model.clear()
        items = [(rng.randrange(model.vocab_size), i, 0) for i in range(prompt)]
        start = time.perf_counter()
        for at in range(0, prompt, BATCH_MAX):
            model.decode(items[at : at + BATCH_MAX], every_logit=False)
        return prompt / (time.perf_counter() - start)

    def decode(width: int) -> float:
        model.clear()
        steps = [[(rng.randrange(model.vocab_size), i, s) for s in range(width)] for i in range(generate + 1)]
        model.decode(steps[0], every_logit=True)
        start = time.perf_counter()
        for items in steps[1:]:
            model.decode(items, every_logit=True)
        return width * generate / (time.perf_counter() - start)

    results = []
    if prompt:
        prefill()
        results.append({"test": f"pp{prompt}", "batch": 1, "tokens_per_s": prefill()})
    for width in batches if generate else []:
        decode(width)
        results.append({"test": f"tg{generate}", "batch": width, "tokens_per_s": decode(width)})
    return {"results": results}


def greedy(library: Library, job: dict, started: float) -> dict:
    model = Model(library, job["model"], job["threads"], 4096, 1)
    tokens, out, margins, first = job["tokens"], [], [], None
    model.decode([(token, i, 0) for i, token in enumerate(tokens)], every_logit=False)
    row = len(tokens) - 1
    for step in range(job["count"]):
        token, margin = model.best_two(row)
        first = first or time.perf_counter() - started
        out.append(token)
        margins.append(round(margin, 4))
        if step + 1 < job["count"]:
            model.decode([(token, len(tokens) + step, 0)], every_logit=False)
            row = 0
    return {"greedy": out, "margins": margins, "first_token_s": first}


def quantize(library: Library, job: dict) -> dict:
    params = library.llama.llama_model_quantize_default_params()
    params.words[1] = FILE_TYPES[job["type"]]  # the struct opens with nthread, ftype
    if library.llama.llama_model_quantize(job["model"].encode(), job["out"].encode(), C.byref(params)):
        raise SystemExit(f"llama.cpp cannot quantise {job['model']}")
    return {}


def main() -> None:
    started = time.perf_counter()
    job = json.loads(sys.argv[1])
    if platform.system() != "Linux":
        raise SystemExit("the peer runs on Linux only")
    library = Library(Path(job["libs"]).resolve(), job["variant"])
    match job["job"]:
        case "speed":
            answer = speed(library, job)
        case "greedy":
            answer = greedy(library, job, started)
        case "tokenize":
            model = Model(library, job["model"], 1, 0, 1)
            answer = {"tokens": [model.tokenize(text) for text in job["texts"]]}
        case "quantize":
            answer = quantize(library, job)
        case other:
            raise SystemExit(f"no such job: {other}")
    print(json.dumps(answer | {"variant": library.variant, "features": library.features()}))


if __name__ == "__main__":
    main()
