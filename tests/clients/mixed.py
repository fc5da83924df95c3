"""Mixed requests of the official clients for more models than the server's memory holds, then loads and unloads.

    python mixed.py --url http://127.0.0.1:8000 --key KEY --pid PID --models a,b,c --requests 500

Each answer has to be that of the model that was asked for, which is known from asking one after another. Fails when one is
not, when a request fails, when more models are loaded than fit, or when the server's memory grows.
"""

import argparse
import collections
import json
import pathlib
import random
import re
import sys
import threading
import time
import urllib.request

import anthropic
import openai

THREADS = 8
PROMPTS = ["hello", "one two three", "why is the sky blue"]
TOKENS = 8
GROWTH_MIB = 64
"""Allocators keep what they once had: so much growth over the second half is no leak."""
TIMEOUT_S = 300


class Clients:
    def __init__(self, url, key):
        self.url, self.key = url, key
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_S)

    def ask(self, kind, model, prompt):
        """The name of the model that answered, and its answer."""
        messages = [{"role": "user", "content": prompt}]
        if kind == "chat":
            reply = self.openai.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=TOKENS)
            return reply.model, text_of(reply.choices[0].message)
        if kind == "stream":
            chunks = list(
                self.openai.chat.completions.create(
                    model=model, messages=messages, temperature=0, max_tokens=TOKENS, stream=True
                )
            )
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            return chunks[0].model, "".join(map(text_of, deltas))
        if kind == "completion":
            reply = self.openai.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=TOKENS)
            return reply.model, reply.choices[0].text
        if kind == "messages":
            settings = {"model": model, "messages": messages, "max_tokens": TOKENS}
            reply = self.anthropic.messages.create(**settings, extra_body={"temperature": 0})
            return reply.model, json.dumps([block.model_dump() for block in reply.content])
        assert kind == "ollama"
        options = {"temperature": 0, "num_predict": TOKENS}
        reply = self.post("/api/chat", {"model": model, "messages": messages, "stream": False, "options": options})
        return reply["model"], json.dumps(reply["message"])

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers())
        return json.load(urllib.request.urlopen(request, timeout=TIMEOUT_S))

    def get(self, path):
        request = urllib.request.Request(self.url + path, headers=self.headers())
        return urllib.request.urlopen(request, timeout=TIMEOUT_S).read().decode()

    def headers(self):
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}


KINDS = ["chat", "stream", "completion", "messages", "ollama"]


def text_of(message):
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def resident_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def main():
    parser = argparse.ArgumentParser()
    for name in ["url", "key", "pid", "models"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--fit", type=int, default=2, help="models that fit into the memory")
    options = parser.parse_args()
    clients, models = Clients(options.url, options.key), options.models.split(",")
    expected = {(k, m, p): clients.ask(k, m, p) for m in models for k in KINDS for p in PROMPTS}
    wrong_name = [asked for asked, (name, _) in expected.items() if name != asked[1]]
    assert not wrong_name, f"another model answered: {wrong_name}"
    answers = {prompt: {expected["completion", model, prompt][1] for model in models} for prompt in PROMPTS}
    assert all(len(texts) == len(models) for texts in answers.values()), "models that answer alike show nothing"

    faults, counts, resident = [], collections.Counter(), []
    todo = iter(range(options.requests))
    lock = threading.Lock()

    def work(seed):
        chance = random.Random(seed)
        while True:
            with lock:
                if next(todo, None) is None:
                    return
            asked = (chance.choice(KINDS), chance.choice(models), chance.choice(PROMPTS))
            try:
                answer = clients.ask(*asked)
            except Exception as error:
                faults.append(f"{asked}: {error!r}")
                continue
            if answer != expected[asked]:
                faults.append(f"{asked}: {answer}, not {expected[asked]}")
            with lock:
                counts[asked[1]] += 1
                resident.append(resident_mib(options.pid))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        states = [model["state"] for model in json.loads(clients.get("/v1/models"))["data"]]
        most = max(most, states.count("ready"))
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    assert not faults, "\n".join(faults[:10])
    assert most <= options.fit, f"{most} models were loaded, of which {options.fit} fit"

    def load_and_unload(times):
        for _ in range(times):
            for model in models:
                clients.post("/models/load", {"model": model})
                clients.post("/models/unload", {"model": model})
        return resident_mib(options.pid)

    before, after = load_and_unload(4), load_and_unload(8)
    half = len(resident) // 2
    first, second = max(resident[:half]), max(resident[half:])
    assert second < first + GROWTH_MIB, f"the server grew from {first:.0f} to {second:.0f} MiB"
    assert after < before + GROWTH_MIB / 4, f"loads and unloads took {after - before:.0f} MiB"
    print(
        f"{options.requests} requests in {seconds:.0f} s, by model {dict(counts)}; at most {most} loaded; "
        f"{first:.0f} MiB, then {second:.0f}; unloaded {before:.0f} MiB, after 24 more loads {after:.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
