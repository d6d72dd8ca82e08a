"""This file tells that a process has begun to die, before the kernel has taken back its memory.

That takes tens of milliseconds for a model's weights, and longer for a device's; only after it do
descriptors close and does a pidfd tell. But before it an ending thread gives up its robust mutexes.
So the child's main thread holds one for as long as it lives, in memory that its parent has mapped
as well, and a thread of the parent sleeps until the kernel says there that the owner has died.

It does not know nodes. Laws: a sign is no proof, since `exec` gives mutexes up too: the kernel is
asked for the exit status, and without one there was no sign; a watch uses no core, and its thread
ends with the sign or with `close`; where anything of this is not to be had (another C library,
another kind of processor, a /proc that tells nothing), there is no sign, and no error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

SIZE = mmap.PAGESIZE  # of the memory; the mutex is at its begin
# Of the kernel's interface: the word of a robust mutex is its owner's thread id and two flags.
WAITERS = 0x8000_0000  # somebody is to be woken
OWNER_DIED = 0x4000_0000
OWNER = 0x3FFF_FFFF
FUTEX_WAIT, FUTEX_WAKE = 0, 1
CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # the number of the system call `futex`
# Of the C library's: the same in all that have robust mutexes.
PTHREAD_PROCESS_SHARED = PTHREAD_MUTEX_ROBUST = 1
ATTRIBUTES_BYTES_MAX = 64
# Fields of /proc/PID/stat, counted from the state.
FLAGS, START_CODE, EXIT_STATUS = 6, 23, 49
EXITING = 0x4  # of the flags
HIDDEN = 1  # instead of where the code starts, for whom the exit status is hidden as well


def hold(fd: int) -> bool:
    """The calling thread holds the mutex from now on, until it ends. Takes `fd`, of `SIZE` bytes of
    memory, all zero. False: there is no such mutex here."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    # Not by an object, which could be collected: the kernel and the C library keep the address.
    both = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, SIZE, both, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        return False
    mutex = ctypes.c_void_p(address)
    attributes = ctypes.create_string_buffer(ATTRIBUTES_BYTES_MAX)
    try:
        failed = (
            libc.pthread_mutexattr_init(attributes)
            or libc.pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED)
            or libc.pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST)
            or libc.pthread_mutex_init(mutex, attributes)
            or libc.pthread_mutex_lock(mutex)
        )
    except AttributeError:  # this C library has none
        return False
    word = ctypes.c_uint32.from_address(address)
    if failed or word.value != threading.get_native_id():  # or has the word elsewhere
        return False
    # Nobody else writes here as long as this thread lives, since the parent only looks.
    word.value |= WAITERS
    return True


class Watch:
    """The parent's end of it: sleeps in a thread until the owner of the mutex has died."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Takes `memory`, the same that is handed to the child; `close` closes it."""
        self._memory = memory
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(memory)
        self._thread: threading.Thread | None = None
        self._futex = ctypes.CDLL(None, use_errno=True).syscall
        self._futex.restype = ctypes.c_long
        self._futex.argtypes = (
            *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
        )
        self._call = CALLS.get(os.uname().machine) if sys.maxsize > 1 << 32 else None

    def start(self, pid: int, died: Callable[[], None]) -> None:
        """The child holds the mutex. `died` is called once at most, in another thread."""
        if self._call is not None and self._word is not None and tells_status(pid):
            arguments = (self._call, self._word, died)
            thread = threading.Thread(
                target=self._wait, args=arguments, name=f"end of {pid}", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                thread.start()
                self._thread = thread

    def _wait(self, call: int, word: ctypes.c_uint32, died: Callable[[], None]) -> None:
        failed = 0
        while failed in (0, errno.EAGAIN, errno.EINTR):
            found = word.value
            if found & OWNER_DIED:
                died()
                return
            if not found & OWNER or not found & WAITERS:  # closed
                return
            slept = self._futex(call, ctypes.byref(word), FUTEX_WAIT, found, None, None, 0)
            failed = ctypes.get_errno() if slept else 0

    def close(self) -> None:
        """The process has ended, so nobody else writes the word. Ends the thread and waits for it.
        Idempotent."""
        if self._word is None:
            return
        if self._thread is not None:
            assert self._call is not None
            self._word.value = 0  # what is not asleep yet will not fall asleep
            self._futex(self._call, ctypes.byref(self._word), FUTEX_WAKE, 1, None, None, 0)
            self._thread.join()
            self._thread = None
        self._word = None
        self._memory.close()


def tells_status(pid: int) -> bool:
    """Whether the kernel would tell this process how that one ends."""
    fields = fields_of(pid)
    return fields is not None and int(fields[START_CODE]) != HIDDEN


def status_of_dying(pid: int) -> int | None:
    """How a process ends whose main thread is ending, as in subprocess: negative for a signal.
    None: it isn't."""
    fields = fields_of(pid)
    if fields is None or not int(fields[FLAGS]) & EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS]))


def fields_of(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > EXIT_STATUS else None
