"""SIGTERM finishes the step on all ranks; a rank that died takes the waiting ones with it."""

import os
import signal
import socket
import threading
from pathlib import Path

from colo.ranks import Ranks

LOOK_EVERY_S = 1.0


class StopRequest:
    """Whether someone asked this launch to stop: SIGTERM to torchrun or to any rank.

    torchrun sends SIGTERM both when it was asked to stop, and when a rank failed while the others wait for it in
    a collective. They must not wait then: a thread, which runs even while the main one is inside a collective,
    ends this process once a rank of this host is gone that had neither finished nor asked to stop.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._done = threading.Event()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        ranks.store.set(f"process/{ranks.rank}", f"{_host()} {os.getpid()}")
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank even while it waits inside a collective
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stop")
        self._thread.start()

    def agreed(self) -> bool:
        """True on every rank if one was asked to stop. Collective."""
        return self._ranks.any(self._asked, "agreeing whether to stop")

    def finished(self) -> None:
        """Every rank's work is done: no end is a failure any more, and nothing is watched. Collective.

        The thread must not outlive the interpreter: Python ends a daemon thread that comes back from C++ (the store's)
        by unwinding it, which aborts the process.
        """
        self._ranks.store.set(f"finished/{self._ranks.rank}", "1")
        self._ranks.gather(None, "finishing")  # no rank ends, and with it perhaps the store, before all are here
        self._done.set()
        os.write(self._write_fd, b"\0")
        self._thread.join()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._asked = True

    def _watch(self) -> None:
        while not self._done.is_set() and signal.SIGTERM not in os.read(self._read_fd, 64):
            pass
        while not self._done.wait(LOOK_EVERY_S):
            if any(self._is_gone(rank) for rank in range(self._ranks.world_size)):
                os._exit(1)

    def _is_gone(self, rank: int) -> bool:
        store = self._ranks.store
        if store.check([f"finished/{rank}"]) or not store.check([f"process/{rank}"]):
            return False
        host, pid = store.get(f"process/{rank}").decode().rsplit(" ", 1)
        if host != _host():
            return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return not store.check([f"finished/{rank}"])
        return False


def _host() -> str:
    """This host, and this container on it: a process id means something there alone."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{os.readlink(namespace) if namespace.exists() else ''}/{_boot_id()}"


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
