"""Runs inside vLLM, when switched on, and reports what is not visible from outside on vLLM's own metrics endpoint.

vLLM loads ``register`` in each of its processes (entry point group ``vllm.general_plugins``) and
``stat_logger.StepLogger`` in its API servers (``vllm.stat_logger_plugins``). Both do nothing unless
``KVPRESSURE_PLUGIN=1``. Nothing here raises into vLLM, and only the standard library and prometheus_client, which
vLLM has, are imported.
"""

from __future__ import annotations

import os
import threading

from kvpressure_vllm.report import guarded, switched_on

_lock = threading.Lock()
_thread_of: int | None = None  # process that has a sampling thread; a fork copies the number but not the thread
_hooked = False


@guarded
def register() -> None:
    """Entry point: follow torch's allocator in this process. May be called any number of times, in any process."""
    global _hooked
    if not switched_on():
        return
    with _lock:
        if not _hooked:
            os.register_at_fork(after_in_child=_after_fork)
            _hooked = True
    _start()


@guarded
def _after_fork() -> None:
    """Start the thread again, because it does not survive a fork and vLLM does not load the plugin again there."""
    global _lock
    _lock = threading.Lock()  # another thread may have held it at the fork
    _start()


def _start() -> None:
    global _thread_of
    with _lock:
        if _thread_of == os.getpid():
            return
        _thread_of = os.getpid()
    from kvpressure_vllm.allocator import follow

    threading.Thread(target=follow, name="kvpressure-allocator", daemon=True).start()
