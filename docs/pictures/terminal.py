"""Records commands in a pseudo-terminal, and draws what they print as an SVG that plays once, at the speed of the recording."""

import fcntl
import html
import os
import pty
import re
import select
import struct
import subprocess
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 88
PROMPT = "$ "
# Commands, and the lines that are typed while they run. Greedy, so that the answers are the same each time.
SESSION = [
    (["run", "What is the capital of France?", "--temperature", "0"], []),
    (["chat", "--temperature", "0"], ["Give me three short tips for writing clear code.", "/exit"]),
]
# A program that waits for a line turns bracketed paste on.
AWAITS_LINE = b"\x1b[?2004h"
# How the commands are typed, in seconds.
KEY_S, BEFORE_S, AFTER_S = 0.045, 0.6, 0.5
# What is printed within so many seconds appears together.
FRAME_S = 0.04
FONT_SIZE, COLUMN_WIDTH, LINE_HEIGHT, MARGIN, BAR = 14, 8.43, 21, 20, 36
CONTROL = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def session(consort: Path) -> str:
    screen = Screen()
    clock = 0.0
    for arguments, lines in SESSION:
        clock = screen.type_command("consort " + " ".join(shell_word(word) for word in arguments), clock + BEFORE_S) + AFTER_S
        for seconds, output in record([str(consort), *arguments], lines):
            last = clock + seconds
            screen.write(output, last)
        clock = last
    screen.prompt(clock)
    return draw(screen)


def shell_word(word: str) -> str:
    return f'"{word}"' if " " in word else word


def record(command: list[str], lines: list[str]) -> list[tuple[float, bytes]]:
    """What the command writes to a terminal, with the seconds since its start, while these lines are typed."""
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory(prefix="consort-pictures-") as state:
        environment = os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "XDG_STATE_HOME": state}
        begun = time.monotonic()
        process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True)
        os.close(other)
        written, lines, keys, next_key = [], list(lines), b"", 0.0
        while True:
            ready, _, _ = select.select([terminal], [], [], max(0.0, next_key - time.monotonic()) if keys else None)
            if not ready:
                os.write(terminal, keys[:1])
                keys, next_key = keys[1:], time.monotonic() + KEY_S
                continue
            try:
                output = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            written.append((time.monotonic() - begun, output))
            if AWAITS_LINE in output and lines:
                keys, next_key = lines.pop(0).encode() + b"\r", time.monotonic() + BEFORE_S
        os.close(terminal)
        if process.wait() != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n" + b"".join(output for _, output in written).decode(errors="replace"))
    return written


@dataclass
class Cell:
    text: str
    style: str
    seconds: float


class Screen:
    """What is left on the screen at the end, and when each character came. It never scrolls."""

    def __init__(self):
        self.cells: dict[tuple[int, int], Cell] = {}
        self.row, self.column, self.style, self.rest = 0, 0, "", b""

    def prompt(self, seconds: float) -> None:
        for character in PROMPT:
            self.put(character, "prompt", seconds)

    def type_command(self, text: str, seconds: float) -> float:
        self.prompt(seconds - BEFORE_S)
        for character in text:
            self.put(character, "typed", seconds)
            seconds += KEY_S
        self.row, self.column = self.row + 1, 0
        return seconds

    def put(self, character: str, style: str, seconds: float) -> None:
        if self.column == COLUMNS:
            self.row, self.column = self.row + 1, 0
        self.cells[self.row, self.column] = Cell(character, style, seconds)
        self.column += 1

    def write(self, output: bytes, seconds: float) -> None:
        output = self.rest + output
        # Half a character or half a control sequence waits for the rest.
        cut = re.search(rb"(\x1b(\[[0-9;?]*)?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z", output)
        output, self.rest = (output[: cut.start()], cut[0]) if cut else (output, b"")
        end = 0
        for control in CONTROL.finditer(output):
            self.write_text(output[end : control.start()], seconds)
            self.obey(control[2], control[1])
            end = control.end()
        self.write_text(output[end:], seconds)

    def write_text(self, text: bytes, seconds: float) -> None:
        for character in text.decode():
            match character:
                case "\n":
                    self.row += 1
                case "\r":
                    self.column = 0
                case "\b":
                    self.column = max(0, self.column - 1)
                case _ if character.isprintable():
                    self.put(character, self.style, seconds)

    def obey(self, name: bytes | None, parameters: bytes | None) -> None:
        numbers = [int(number) for number in re.findall(rb"\d+", parameters or b"")]
        count = numbers[0] if numbers else 1
        match name:
            case b"m":
                self.style = "soft" if 2 in numbers else "strong" if 1 in numbers else ""
            case b"K":
                from_column = 0 if numbers == [2] else self.column
                self.erase(lambda row, column: row == self.row and column >= from_column)
            case b"J":
                self.erase(lambda row, column: (row, column) >= (self.row, self.column))
            case b"A":
                self.row = max(0, self.row - count)
            case b"B":
                self.row += count
            case b"C":
                self.column += count
            case b"D":
                self.column = max(0, self.column - count)
            case b"G":
                self.column = count - 1

    def erase(self, is_erased) -> None:
        self.cells = {place: cell for place, cell in self.cells.items() if not is_erased(*place)}


def draw(screen: Screen) -> str:
    rows = max(row for row, _ in screen.cells) + 1
    width, height = MARGIN * 2 + COLUMNS * COLUMN_WIDTH, BAR + MARGIN + rows * LINE_HEIGHT
    texts = []
    for row in range(rows):
        for column, run in runs(screen, row):
            text = "".join(cell.text for cell in run)
            x, y = MARGIN + column * COLUMN_WIDTH, BAR + 20 + row * LINE_HEIGHT
            style = f' class="{run[0].style}"' if run[0].style else ""
            texts.append(
                f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * COLUMN_WIDTH:.1f}"{style}'
                f' style="animation-delay:{run[0].seconds:.2f}s">{html.escape(text)}</text>'
            )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img">
<title>consort answers a question in a terminal</title>
<style>
text {{ font: {FONT_SIZE}px ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #ecebe6; white-space: pre; animation: appear 1ms both; }}
.soft {{ fill: #a5a198; }} .strong {{ font-weight: bold; }} .prompt {{ fill: #6fc7bd; }} .typed {{ fill: #ffffff; }}
@keyframes appear {{ from {{ visibility: hidden; }} to {{ visibility: visible; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="10" fill="#1d1d1b"/>
<g fill="#4a4843"><circle cx="22" cy="19" r="5.5"/><circle cx="40" cy="19" r="5.5"/><circle cx="58" cy="19" r="5.5"/></g>
{chr(10).join(texts)}
</svg>
"""


def runs(screen: Screen, row: int) -> list[tuple[int, list[Cell]]]:
    """Neighbouring characters of one style that came at about the same time, each with its first column."""
    found: list[tuple[int, list[Cell]]] = []
    for column in range(COLUMNS):
        cell = screen.cells.get((row, column))
        if cell is None:
            continue
        first, run = found[-1] if found else (0, [])
        is_next = run and first + len(run) == column and run[0].style == cell.style
        if is_next and cell.seconds - run[0].seconds < FRAME_S:
            run.append(cell)
        else:
            found.append((column, [cell]))
    return found
