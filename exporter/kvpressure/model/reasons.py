"""Why a scrape failed: the closed set of words for ``Scrape.error`` and the ``reason`` label."""

from __future__ import annotations

from typing import Final

# Below HTTP
TIMEOUT: Final = "timeout"
REFUSED: Final = "refused"
UNREACHABLE: Final = "unreachable"
DNS: Final = "dns"
RESET: Final = "reset"  # also a body that ends too early
TLS: Final = "tls"
# HTTP
REDIRECT: Final = "redirect"
UNAUTHORIZED: Final = "unauthorized"  # 401 and 403
HTTP_404: Final = "http_404"
HTTP_4XX: Final = "http_4xx"  # any other
HTTP_5XX: Final = "http_5xx"
BAD_ENCODING: Final = "bad_encoding"
PROTOCOL: Final = "protocol"  # not HTTP, or not as the standard says
TOO_LARGE: Final = "too_large"
CROWDED: Final = "crowded"  # too many large responses at once
# The text
INVALID_UTF8: Final = "invalid_utf8"
HTML: Final = "html"
JSON: Final = "json"
EMPTY: Final = "empty"
BAD_TIMESTAMPS: Final = "bad_timestamps"  # every sample has a time of its own, of another moment
SERIES_COLLIDE: Final = "series_collide"  # several series have one name, and it is unknown which is meant
NO_ENGINE_METRICS: Final = "no_engine_metrics"  # switched off, or software that is unknown
NOT_METRICS: Final = (REDIRECT, BAD_ENCODING, PROTOCOL, INVALID_UTF8, HTML, JSON, EMPTY)
"""Answers of a program that is probably no engine."""
# Metrics of known software that is no engine; ``engines.other_software`` has what to do about each
OTHER_SOFTWARE: Final = (
    "production_stack_router",
    "vllm_router",
    "sglang_router",
    "tensorrt_llm",
    "tgi",
    "llama_cpp",
    "lmdeploy",
    "dynamo",
    "triton",
    "litellm",
    "endpoint_picker",
    "queue_proxy",
    "dcgm_exporter",
    "node_exporter",
    "kvpressure",
    "service_mesh",
    "ray",
)
"""In search order: the more specific first."""
# Who answers
# One address, answered by several processes in turn: a Service with replicas
SEVERAL_SERVERS: Final = "several_servers"
SAME_SERVER: Final = "same_server"  # read under another address already
# Ours
TARGET_LIMIT: Final = "target_limit"  # not asked: more targets than allowed
NEVER_ANSWERED: Final = "never_answered"  # of an engine that is only assumed; not a reason of a scrape
INTERNAL: Final = "internal"  # a bug in the exporter; its debug log has the traceback

_SHORT: Final = {
    REFUSED: "connection refused",
    RESET: "connection reset",
    DNS: "host name not found",
    TIMEOUT: "timed out",
    UNREACHABLE: "host unreachable",
    TLS: "TLS error",
    REDIRECT: "redirected",
    UNAUTHORIZED: "login required (HTTP 401 or 403)",
    HTTP_404: "HTTP 404 response",
    HTTP_4XX: "HTTP 4xx response, not 401, 403 or 404",
    HTTP_5XX: "HTTP 5xx response",
    BAD_TIMESTAMPS: "every sample is stamped more than two minutes before or after the scrape",
    SERIES_COLLIDE: "series collide in a label that is not known",
    NO_ENGINE_METRICS: "no engine metrics there",
    HTML: "HTML instead of metrics",
    JSON: "JSON instead of metrics",
    EMPTY: "empty response",
    TOO_LARGE: "response too large",
    TARGET_LIMIT: "not scraped, because there are more targets than allowed",
    INTERNAL: "internal error of the exporter",
}
"""Words for a sentence; other reasons are their name with spaces."""


def in_words(reason: str) -> str:
    """A reason in words for a sentence, such as ``connection refused``; "" for ""."""
    return _SHORT.get(reason, reason.replace("_", " "))


REASONS: Final = (
    TIMEOUT,
    REFUSED,
    UNREACHABLE,
    DNS,
    RESET,
    TLS,
    REDIRECT,
    UNAUTHORIZED,
    HTTP_404,
    HTTP_4XX,
    HTTP_5XX,
    BAD_ENCODING,
    PROTOCOL,
    TOO_LARGE,
    CROWDED,
    INVALID_UTF8,
    HTML,
    JSON,
    EMPTY,
    BAD_TIMESTAMPS,
    SERIES_COLLIDE,
    NO_ENGINE_METRICS,
    *OTHER_SOFTWARE,
    SEVERAL_SERVERS,
    SAME_SERVER,
    TARGET_LIMIT,
    INTERNAL,
)
