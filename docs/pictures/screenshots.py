"""Screenshots of the page: a server with the default model that answers, and three machines that share the model."""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from browser import Browser

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import lan  # noqa: E402

WIDTH = 1200
SERVING = ["serve", "--port", "0", "--no-store"]
QUESTION = "Write a Python function that counts the vowels in a text, and explain it briefly."
# Greedy, so that the picture shows the same answer each time.
SETTINGS = {"temperature": "0", "max_tokens": "400"}
# The machines that join, with the memory that they lend and their layers. Another one serves, and has the rest.
JOINED = [("kitchen", "500M", "10"), ("attic", "400M", "12")]
# How long the cluster's speed is plotted, with so many answers at once.
PLOT_S, ANSWERS = 45, 3


def page(consort: Path) -> bytes:
    with contextlib.ExitStack() as stack:
        server = start([consort, *SERVING], os.environ)
        stack.callback(lan.end, server)
        with Browser(WIDTH, 760) as browser:
            browser.open(wait_ready(server))
            ask(browser, QUESTION)
            browser.eval("document.querySelector('#scroll').scrollTop = 0")
            return browser.picture()


def cluster(consort: Path) -> bytes:
    options = argparse.Namespace(consort=consort, cpu_level=None)
    lan.remove_leftovers()
    with lan.Machines(options, len(JOINED), joins=False) as machines, contextlib.ExitStack() as stack:
        addresses = [f"{lan.address(index)}:{lan.PORT}" for index in range(1, len(JOINED) + 1)]
        for index, (name, memory, _) in enumerate(JOINED, 1):
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="consort-pictures-"))
            listen = ["--listen", addresses[index - 1], "--no-mdns", "--store", store]
            process = machines.start(index, [consort, "join", "--name", name, "--memory", memory, "-t", "1", *listen])
            wait_line(process, "ready to run layers")
        chain = ["--node", ",".join(addresses), "--split", ",".join(layers for *_, layers in JOINED), "-t", "1"]
        server = machines.start(0, [consort, *SERVING, *chain])
        address = wait_ready(server)
        with Browser(WIDTH, 770, machines.within(0, [])) as browser:
            browser.open(address)
            ask(browser, QUESTION)
            browser.click("#tab-cluster")
            browser.wait(f"document.querySelectorAll('.stage-box').length === {len(JOINED) + 1}")
            body = '{"messages": [{"role": "user", "content": "Tell a long story."}], "ignore_eos": true}'
            # Nobody waits for these answers: they end with the page.
            browser.eval(f"""window.answers = Array.from({{ length: {ANSWERS} }}, () => fetch('/v1/chat/completions',
                {{ method: 'POST', headers: {{ 'content-type': 'application/json' }}, body: {body!r} }})); null""")
            browser.eval(f"new Promise((resolve) => setTimeout(resolve, {PLOT_S * 1000}))")
            return browser.picture()


def ask(browser: Browser, question: str) -> None:
    browser.wait("document.querySelector('#state').dataset.kind === 'ready'")
    browser.click("#open-settings")
    for name, value in SETTINGS.items():
        browser.write(f"#settings [name={name}]", value)
    browser.click("#settings .primary")
    browser.wait("!document.querySelector('#settings').open")
    browser.write("#prompt", question)
    browser.click("#send")
    browser.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')")


def start(command: list, environment) -> subprocess.Popen:
    return subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)


def wait_ready(server: subprocess.Popen) -> str:
    """The address of a server whose model is loaded."""
    line = wait_line(server, "ready: ")
    return re.search(r"http://[^\s\"]+", line)[0]


def wait_line(process: subprocess.Popen, text: str) -> str:
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line
    sys.exit("consort has ended:\n" + "".join(seen))
