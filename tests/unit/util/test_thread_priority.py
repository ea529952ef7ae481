from __future__ import annotations

import _thread
import os
import sys
import threading
from queue import SimpleQueue

import pytest

from ovmstrio.util.thread_priority import lower_native_threads
from tests.support.waits import WAIT_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def _nice(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_threads_that_python_has_not_started_get_a_lower_priority() -> None:
    started: SimpleQueue[int] = SimpleQueue()
    over = threading.Event()

    def wait() -> None:
        started.put(threading.get_native_id())
        over.wait(WAIT_SECONDS)

    main = _nice(os.getpid())
    python_thread = threading.Thread(target=wait)
    python_thread.start()
    ours = started.get(timeout=WAIT_SECONDS)
    # The threading module does not know such a thread, like those of native libraries.
    _thread.start_new_thread(wait, ())
    native = started.get(timeout=WAIT_SECONDS)
    try:
        for _ in range(2):
            lower_native_threads()
            assert (_nice(os.getpid()), _nice(ours), _nice(native)) == (main, main, min(main + 7, 19))
    finally:
        over.set()
        python_thread.join(WAIT_SECONDS)
