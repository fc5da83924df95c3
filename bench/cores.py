"""Whether two threads of this machine are two cores.

A hypervisor sometimes runs two virtual CPUs as the two hyperthreads of one core. Then nothing that is bound by
arithmetic gets faster with a second thread, and a measurement with two threads says little. The test is a loop of
independent vector FMAs that fills a core by itself, given as machine code, because the standard library has nothing
that computes outside the interpreter's lock.
"""

import ctypes
import mmap
import platform
import threading
import time
from pathlib import Path

LOOPS = 30_000_000
CHAINS = 10  # two FMA ports times a latency of four cycles, and some to spare


def two_threads_over_one() -> float | None:
    """Work per second of two threads over that of one, best of three; None where the loop cannot run."""
    if platform.machine() != "x86_64" or " fma " not in Path("/proc/cpuinfo").read_text():
        return None
    page, loop = fma_loop()
    one = min(seconds(loop, 1) for _ in range(3))
    two = min(seconds(loop, 2) for _ in range(3))
    del page
    return 2 * one / two


def seconds(loop, threads: int) -> float:
    workers = [threading.Thread(target=loop, args=(LOOPS,)) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def fma_loop():
    """A page of machine code, and the function `void loop(uint64_t times)` in it, which runs without the lock."""
    # vxorps ymm_i, ymm_i, ymm_i, then over and over vfmadd231ps ymm_i, ymm15, ymm15
    clear = b"".join(vex_256(i, i, i, opcode_map=1, prefix=0, opcode=0x57) for i in [*range(CHAINS), 15])
    body = b"".join(vex_256(i, 15, 15, opcode_map=2, prefix=1, opcode=0xB8) for i in range(CHAINS))
    body += b"\x48\xff\xcf"  # dec rdi
    back = -(len(body) + 6)
    body += b"\x0f\x85" + back.to_bytes(4, "little", signed=True)  # jnz to the start of the body
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(clear + body + b"\xc5\xf8\x77\xc3")  # vzeroupper, ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return page, ctypes.CFUNCTYPE(None, ctypes.c_uint64)(address)


def vex_256(out: int, left: int, right: int, opcode_map: int, prefix: int, opcode: int) -> bytes:
    """A three-operand 256-bit instruction on registers, in the three-byte VEX form."""
    high = lambda register: 0 if register >= 8 else 1
    second = high(out) << 7 | 1 << 6 | high(right) << 5 | opcode_map
    third = (~left & 15) << 3 | 1 << 2 | prefix
    return bytes([0xC4, second, third, opcode, 0xC0 | (out & 7) << 3 | right & 7])
