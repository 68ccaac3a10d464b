"""The class that vLLM's API server calls after every engine step (``vllm.stat_logger_plugins``, since 0.12).

Imported by vLLM alone, because it must derive from vLLM's class. vLLM insists on a class even when the plugin is
switched off; it then does nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvpressure_vllm.report import guarded, switched_on
from kvpressure_vllm.steps import FRONTEND, StepCounts


class StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts the steps of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002
        self._counts: StepCounts | None = None
        self._start(engine_index)

    @guarded
    def _start(self, engine_index: int) -> None:
        if switched_on():
            self._counts = FRONTEND.engine(engine_index)

    @guarded
    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called after every step. Further arguments differ between vLLM versions."""
        if self._counts is not None:
            self._counts.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM requires the method."""
