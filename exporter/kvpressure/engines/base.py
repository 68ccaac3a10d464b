"""What the package needs to know about one inference server: ``EngineDialect``, filled by the folder of that engine.

A dialect is data and pure functions; what it leaves out has a default that says "unknown", so that a dialect which maps
two series is complete. Spellings, flags, log lines and default values live in the engine's folder and nowhere else.
``registry`` finds dialects by name; a reading carries the name of the one that it was read with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpressure.engines.command import Command, Endpoints, Host
from kvpressure.engines.series import SampleName
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import LogEvent
from kvpressure.model.readings import EngineReading, GpuReading, PageText


@frozen
class EffectiveLimit:
    """A limit in force. ``explicit``: whether it was set, None = unknown. ``source``: args, log,
    metrics, default.
    """

    value: float
    explicit: bool | None
    source: str


@frozen
class Features:
    """What the arguments make of the server, as far as it changes the meaning of readings.

    ``lora``: adapters are served, for whose slots requests may wait. ``kv_role``: what it is to servers with which it
    exchanges KV blocks (kv_producer, kv_consumer, kv_both; empty = some unknown role; None = it exchanges none).
    ``waits_for_blocks``: requests may wait for other servers' blocks, or finished ones for others to fetch theirs.
    ``whole_prompts``: a prompt is taken in whole, so that no gauge moves while it is computed.
    """

    lora: bool = False
    kv_role: str | None = None
    waits_for_blocks: bool = False
    whole_prompts: bool = False


@frozen
class Pool:
    """The settings that decide the size of the KV pool. ``bytes``: per GPU, where it was set outright. Else ``blocks``
    of ``block_size`` tokens with elements of ``dtype`` ("auto" = the model's), of one engine.
    """

    bytes: float | None = None
    blocks: int | None = None
    block_size: int | None = None
    dtype: str = "auto"


@frozen
class PageKind:
    """Kind of server behind a page, if the page shows it: the ``flavour`` in the dialect's own words, and whether
    several API servers share the page.
    """

    flavour: str | None = None
    multi_process: bool | None = None


@frozen
class Known:
    """What is known of one engine when its limits are asked for. ``args`` of the command line, ``logged`` of the
    start-up log; ``facts`` of start-up lines (``model.log_events.FACTS``).
    """

    args: EngineArgs = field(default_factory=EngineArgs)
    logged: EngineArgs | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    reading: EngineReading | None = None
    version: str | None = None
    flavour: str | None = None
    gpu: GpuReading | None = None

    @property
    def merged(self) -> EngineArgs:
        """The arguments of both, the logged ones on top."""
        return self.args if self.logged is None else self.args.merged(self.logged)


class ReadCommand(Protocol):
    """Reads a container's command followed by its args, and its environment (literal values only). Never raises.

    ``entry_point``: the words go to the image's own entry point. ``named``: what ``names_server`` said of the whole
    command line, where ``argv`` is only the part of it that ``command.bounded`` keeps.
    """

    def __call__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        entry_point: bool = False,
        named: bool | None = None,
    ) -> Command: ...


_PREEMPTION: Final = frozenset({"preemption", "preemptions", "preempted"})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineDialect:
    """One inference server. ``name`` is its word in data and settings, ``title`` in sentences."""

    name: str
    title: str

    # --- pods and command lines: is a container this engine's server, and with which arguments
    may_start: Callable[[Sequence[str], Mapping[str, str]], bool] = lambda *_: False
    """Whether anything in a command line, or in a variable that it may use, looks like a start of the server. Cheap."""
    names_server: Callable[[Sequence[str]], bool] = lambda *_: False
    """Whether the text of a command line, understood or not, has the words that start the server."""
    read_command: ReadCommand = lambda *_, **__: Command(EngineArgs(), False, False)
    of_image: Callable[[str], bool] = lambda *_: False
    """Whether an image (lower case, ``registry/path/name:tag``, without digest) brings the server. Anything
    may stand in a path.
    """
    host: Callable[[str, Sequence[str], Mapping[str, str], EngineArgs], Host | None] = lambda *_: None
    """The program around the server that publishes its metrics, from the image, the command line and its variables."""
    takes_words: Callable[[Sequence[str], EngineArgs], bool] = lambda *_: False
    """Whether words for the entry point of its image are arguments of the server for certain."""
    image_version: Callable[[str, str], str | None] = lambda *_: None
    """The server's version, from the name and tag of an image."""
    environment: tuple[str, ...] = ()
    """Beginnings of the variables that the server reads."""
    default_port: int = 8000
    default_path: str = "/metrics"
    port_names: tuple[str, ...] = ()
    """Names of a container port that stand for the server's, beside the usual ones."""
    endpoints: Callable[[EngineArgs], Endpoints] = lambda *_: Endpoints()

    # --- the metrics page
    samples: Mapping[str, SampleName] = field(default_factory=dict)
    """Every sample name that is read (``series.table``)."""
    identify: Callable[[Mapping[str, str]], tuple[str | None, str | None]] = lambda labels: (
        labels.get("model_name"),
        None,
    )
    """The model and the engine that a series' labels name; a series without a model is of no engine."""
    repeated_by: frozenset[str] = frozenset()
    """Labels in which series differ that repeat the same value of one engine. Any other difference is a collision."""
    config_labels: frozenset[str] = frozenset()
    """Labels of ``config`` families that are kept, as ``EngineReading.cache_config``."""
    metrics_switch: str = ""
    """The flag by which a server comes to publish its metrics, with or without; "" = it always does."""
    page_kind: Callable[[PageText, Sequence[EngineReading], Mapping[str, float]], PageKind] = lambda *_: PageKind()
    """Who wrote a page: its text, its engines of this dialect, its page values."""

    # --- the log
    log_words: tuple[str, ...] = ()
    """At least one of these is in every line that is recognised: the cheap first look."""
    strip: Callable[[str], str] = lambda line: line
    """The message of a log line without prefixes."""
    recognise: Callable[[str], LogEvent | None] = lambda *_: None
    """The event of a stripped line."""

    # --- what of it may leave the node: what is known to be no secret
    public_words: Callable[[EngineArgs], tuple[str, ...]] = lambda *_: ()
    """A command line written anew from what may be known of the arguments."""
    public_environment: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda *_: {}
    """The server's own variables, with the values that may be known."""
    public_line: Callable[[str], str | None] = lambda *_: None
    """What of a recognised log line may be kept; ``None`` of any other."""

    # --- limits and capacity
    limits: Callable[[Known], Mapping[str, EffectiveLimit]] = lambda *_: {}
    """Every limit of ``model.state.LIMITS`` that is known, from the best source."""
    default_limits: Callable[[str | None, str | None, float | None], Mapping[str, float]] = lambda *_: {}
    """Defaults by version, GPU name ("cpu" = none) and its bytes; a missing one is unknown."""
    reference_version: str = ""
    """The release whose defaults are meant where none is given."""
    capacity_tokens: Callable[[EngineReading, int], float | None] = lambda *_: None
    """Tokens that the KV cache of one engine holds."""
    block_size: Callable[[EngineReading], float | None] = lambda *_: None
    """Tokens in a KV block."""
    pool: Callable[[EngineArgs, EngineReading | None, int], Pool] = lambda *_: Pool()
    features: Callable[[EngineArgs, str | None, Sequence[str]], Features] = lambda *_: Features()
    """From the arguments, the page's flavour, and the names of the gauges and page values that there are."""

    # --- what advice and verdicts may call things
    flag: Callable[[str], str] = _option
    """The flag that sets a limit or another argument of the normal form; "" = there is none."""
    flags_since: Mapping[str, str] = field(default_factory=dict)
    """The release in which a flag came that older ones lack, by argument."""
    deferred_since: str = ""
    """The release that first published how many requests wait for something else than capacity; "" = none does."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What it calls the loss of a request's KV blocks: its own words for preemption, preemptions and preempted."""

    def called(self, name: str) -> str:
        """What sentences call an argument of the normal form or one of ``words``."""
        if name in _PREEMPTION:
            return self.words.get(name, name)
        return self.flag(name).removeprefix("--").replace("-", "_") or name

    # --- command lines and stored series that people keep
    start_words: re.Pattern[str] | None = None
    """The words in a script behind which options of the server may be put."""
    misspelt: Callable[[Iterable[str]], Mapping[str, str]] = lambda _: {}
    """Names of arguments that no release has, with the argument that each probably means."""
    helm_names: Mapping[str, str] = field(default_factory=dict)
    """Arguments that the engine's usual chart has as values, and what it calls them."""
    series_pattern: str = ""
    """A regular expression of its series' names, for a Prometheus that stores them."""
    series_labels: frozenset[str] = frozenset()
    """Labels by which series of one page differ, beside ``model_name`` and those of Prometheus' client."""
