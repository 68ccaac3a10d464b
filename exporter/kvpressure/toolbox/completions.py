"""Streaming completions for the probe: each in a thread, bounded in time, countable while it runs."""

from __future__ import annotations

import http.client
import json
import random
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from kvpressure.model import ceilings
from kvpressure.parsed import items, json_of, mapping
from kvpressure.sources.scrape.fetch import tls_context
from kvpressure.sources.scrape.targets import Target

_LOW, _HIGH = 10, 990  # token ids that every vocabulary has
_MAX_LINE: Final = 1024 * 1024
_MAX_ERROR_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request: prompt and output tokens."""

    prompt_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        """Prompt plus output tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Api:
    """The server's API. ``seed`` makes prompts unique, so that no prefix is shared."""

    target: Target
    model: str
    key: str | None = None
    timeout_seconds: float = 300.0


class Completion(threading.Thread):
    """One running request. ``answered``: output tokens received; ``error``: why it failed."""

    def __init__(self, api: Api, ask: CompletionRequest, seed: int) -> None:
        super().__init__(name=f"completion-{seed}", daemon=True)
        self._api = api
        self.ask = ask
        self._seed = seed
        self.answered = 0
        self.error: str | None = None

    @property
    def decoding(self) -> bool:
        """Whether it has its first token but not its last."""
        return self.is_alive() and 0 < self.answered < self.ask.output_tokens

    def run(self) -> None:
        """Send the request and count the streamed tokens."""
        end = monotonic() + self._api.timeout_seconds
        connection = _connection(self._api.target, self._api.timeout_seconds)
        try:
            connection.request("POST", "/v1/completions", self._body(), self._headers())
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f"status {answer.status}: {_message(answer.read(_MAX_ERROR_BYTES))}"
                return
            self._count(answer, end)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            connection.close()

    def _count(self, answer: http.client.HTTPResponse, end: float) -> None:
        while line := answer.readline(_MAX_LINE):
            if monotonic() > end:
                self.error = f"no end within {self._api.timeout_seconds:.0f} s"
                return
            if line.startswith(b"data: {"):
                self._take(mapping(json.loads(line[6:])))

    def _take(self, chunk: Any) -> None:
        """Count a chunk: by the server's token count if it has one, else as one token."""
        if "error" in chunk:
            raise ValueError(str(mapping(chunk["error"]).get("message") or chunk["error"])[:200])
        told = ceilings.whole(mapping(chunk.get("usage")).get("completion_tokens"), ceilings.COUNT)
        if told is not None:
            self.answered = max(self.answered, told)
        elif items(chunk.get("choices")):
            self.answered += 1

    def _body(self) -> bytes:
        words = random.Random(self._seed)
        return json.dumps(
            {
                "model": self._api.model,
                "prompt": [words.randrange(_LOW, _HIGH) for _ in range(self.ask.prompt_tokens)],
                "max_tokens": self.ask.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()

    def _headers(self) -> dict[str, str]:
        key = {} if self._api.key is None else {"Authorization": f"Bearer {self._api.key}"}
        return {"Content-Type": "application/json", "User-Agent": "kvpressure", **key}


def _connection(target: Target, timeout: float) -> http.client.HTTPConnection:
    if target.scheme == "http":
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout)
    return http.client.HTTPSConnection(target.host, target.port, timeout=timeout, context=tls_context(target))


def _message(body: bytes) -> str:
    """The message in an error's JSON, else its beginning."""
    document = mapping(json_of(body))
    message = mapping(document.get("error")).get("message") or document.get("message")
    return str(message or body.decode(errors="replace")).replace("\n", " ")[:200]
