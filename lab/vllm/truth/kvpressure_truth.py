"""What vLLM's per-step log line says, with a time to the millisecond and from every API server.

A stat logger of its own, independent of kvpressure's plugin: with several API servers vLLM writes no such lines to its
log. Needs ``--enable-logging-iteration-details``; one line a step goes to ``$KVPRESSURE_TRUTH.<pid>``: time, engine,
iteration, context requests, generation requests.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class TruthLogger(StatLoggerBase):
    """Writes the details of every step that vLLM hands over."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002
        path = os.environ.get("KVPRESSURE_TRUTH")
        self._out = open(f"{path}.{os.getpid()}", "a", buffering=1) if path else None  # noqa: SIM115, PTH123

    def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        """One step."""
        details = getattr(scheduler_stats, "iteration_details", None)
        if self._out is not None and details is not None and not details.is_dummy:
            self._out.write(
                f"{time.time():.3f} {engine_idx} {details.iteration_index} {details.num_ctx_requests} "
                f"{details.num_generation_requests}\n"
            )

    def log_engine_initialized(self) -> None:
        """Nothing to say: vLLM demands the method."""
