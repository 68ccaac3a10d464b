"""Metrics pages of vLLM engines: bounded fetching, a scanner for both dialects, one alias table for all versions."""

from kvpressure.sources.vllm.exposition import Scanner, ScanResult, page_from_text
from kvpressure.sources.vllm.fetch import PageFetcher
from kvpressure.sources.vllm.reasons import REASONS
from kvpressure.sources.vllm.source import VllmSource
from kvpressure.sources.vllm.targets import Target, TargetError, parse_target

__all__ = [
    "REASONS",
    "PageFetcher",
    "ScanResult",
    "Scanner",
    "Target",
    "TargetError",
    "VllmSource",
    "page_from_text",
    "parse_target",
]
