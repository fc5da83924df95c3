"""A headless Chromium, driven with the DevTools protocol over a pipe: it needs no port, and ends with this process."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
WAIT_S = 180


class Browser:
    """One page. `within` is put before the command, such as `ip netns exec NAME`."""

    def __init__(self, width: int, height: int, within: list[str] = ()):
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise SystemExit("Chromium is missing: apt-get install chromium")
        self.profile = tempfile.TemporaryDirectory(prefix="consort-pictures-")
        self.number, self.unread = 0, b""
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
                 "--disable-sync", "--force-color-profile=srgb", f"--user-data-dir={self.profile.name}"]  # fmt: skip
        # The protocol uses descriptors 3 and 4.
        shell = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1']
        self.process = subprocess.Popen([*within, *shell, program, *flags, "about:blank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1.5, mobile=False)
        light = [{"name": "prefers-color-scheme", "value": "light"}]
        self.call("Emulation.setEmulatedMedia", media="screen", features=light)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        time.sleep(0.5)  # its children end after it, and write into the profile until then
        self.profile.cleanup()

    def call(self, method: str, **parameters) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            reply = json.loads(self.read_message())
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def read_message(self) -> bytes:
        while b"\0" not in self.unread:
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise RuntimeError("Chromium has ended")
            self.unread += more
        message, _, self.unread = self.unread.partition(b"\0")
        return message

    def eval(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str):
        """Waits until an expression is true. An exception counts as false."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            value = self.eval(f"(() => {{ try {{ return ({expression}); }} catch {{ return null; }} }})()")
            if value:
                return value
            time.sleep(0.1)
        raise RuntimeError(f"never true: {expression}\n" + (self.eval("document.body?.innerText") or ""))

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement.dataset.started !== undefined")

    def write(self, selector: str, text: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self) -> bytes:
        self.eval("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => {})))")
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
