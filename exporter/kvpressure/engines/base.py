"""What the package needs to know about an inference server: ``EngineDialect``, filled in by that engine's folder, how
it maps series to canonical readings, and which of several servers on one endpoint a series belongs to.

A family lists its spellings newest first; if several are present, the newest counts. Spellings omit the prefix and a
counter's ``_total``; every prefix and both counter forms are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from kvpressure.engines.command import Command, Endpoints, Host
from kvpressure.engines.options import Options
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import LogEvent
from kvpressure.model.pools import KV_ROLES, LABEL, EnginePool
from kvpressure.model.readings import EngineReading, GpuReading, PageText
from kvpressure.model.state import Limit

Kind = Literal["gauge", "counter", "histogram", "page", "config"]
Part = Literal["value", "bucket", "sum", "count"]


@frozen
class Family:
    """One metric under all its names.

    ``canonical``: its name here. A family split by ``label`` has ``values`` (label value -> canonical name), or
    ``canonical`` as prefix of any value. ``scale``: what to multiply a counter by for base units. ``ceiling``: the
    largest accepted value, as published. ``per_model``: no engine label; the
    value holds for every engine of the model. ``per_server``: no engine label; the value is of all engines of the
    server together, so it is used only where the model has one engine. ``join``: how several series form one value,
    e.g. of several processes, which the labels in ``copies`` distinguish; with ``sum``, families of one canonical
    name add up. ``also``: canonical name -> another one to which the value is added too, and so on. ``named``: the
    canonical name of a series by its labels, where one of them does not give it.
    """

    kind: Kind
    names: tuple[str, ...]
    canonical: str = ""
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    scale: float = 1.0
    ceiling: float = ceilings.COUNT
    per_model: bool = False
    per_server: bool = False
    join: Literal["max", "sum"] = "max"
    copies: tuple[str, ...] = ("pid",)
    also: Mapping[str, str] = field(default_factory=dict, hash=False)
    named: Callable[[Mapping[str, str]], str | None] | None = None

    def canonical_for(self, labels: Mapping[str, str]) -> str | None:
        """The canonical name of a series with these labels; ``None`` if it is not used."""
        if self.named is not None:
            return self.named(labels)
        if not self.label:
            return self.canonical
        value = labels.get(self.label)
        if value is None:
            return None
        return self.values.get(value) if self.values else self.canonical + value


@frozen
class SampleName:
    """Meaning of one sample name: part of which family, age of the spelling (0 = newest), and dialect."""

    family: Family
    age: int
    part: Part = "value"
    dialect: str = ""


def gauge(canonical: str, *names: str, ceiling: float = ceilings.REQUESTS) -> Family:
    """A gauge under these names, newest first."""
    return Family("gauge", names, canonical, ceiling=ceiling)


def counter(canonical: str, *names: str, ceiling: float = ceilings.COUNT) -> Family:
    """A counter under these names, newest first."""
    return Family("counter", names, canonical, ceiling=ceiling)


def histogram(canonical: str, *names: str) -> Family:
    """A histogram under these names, newest first."""
    return Family("histogram", names, canonical)


# Status is a class ("2xx") by default and a code ("200") when the instrumentation does not group.
_STATUSES: Final = {
    f"{c}{rest}": f"{r.HTTP_PREFIX}{c}xx" for c in "12345" for rest in ("xx", *(f"{n:02d}" for n in range(100)))
}
_GENERATING: Final = ("completions", "responses", "messages", "generate")  # how their paths end
PAUSES: Final = {"/pause": "pause", "/sleep": "pause", "/resume": "resume", "/wake_up": "resume"}
"""What an accepted request to a path tells a server to do."""


def _http_name(labels: Mapping[str, str]) -> str | None:
    """By status, and of 2xx apart where a request of the engine gives the answer or the server pauses or resumes."""
    name, path = _STATUSES.get(labels.get("status", "")), labels.get("handler", "")
    if name != f"{r.HTTP_PREFIX}2xx":
        return name
    if path.endswith(_GENERATING):
        return r.HTTP_GENERATED
    return f"{name}:{PAUSES[path]}" if path in PAUSES else name


PAGE_FAMILIES: Final = (
    Family("page", ("process_cpu_seconds_total",), r.PROCESS_CPU_SECONDS, ceiling=ceilings.SECONDS),
    Family("page", ("process_start_time_seconds",), r.PROCESS_START, ceiling=ceilings.MOMENT),
    Family("page", ("process_open_fds",), r.PROCESS_OPEN_FDS),
    Family("page", ("http_requests_total",), label="status", named=_http_name),
)
"""Series of any Python server: of Prometheus' client and its FastAPI instrumentation."""
PAGE_SAMPLES: Final[Mapping[str, SampleName]] = {
    name: SampleName(family, 0) for family in PAGE_FAMILIES for name in family.names
}


_SUFFIXES: Final[Mapping[Kind, tuple[tuple[str, Part], ...]]] = {
    "histogram": (("_bucket", "bucket"), ("_sum", "sum"), ("_count", "count")),
    "counter": (("_total", "value"), ("", "value")),  # from old clients, without
}
"""(suffix, part) of a kind's samples, where it has suffixes."""


def table(
    dialect: str, families: Iterable[Family], prefixes: tuple[str, ...], bare_names: tuple[str, ...] = ()
) -> dict[str, SampleName]:
    """Every sample name of these families; ``bare_names`` also without a prefix."""
    found: dict[str, SampleName] = {}
    for family in families:
        for age, name in enumerate(family.names):
            heads = (*prefixes, "") if name in bare_names else prefixes
            for suffix, part in _SUFFIXES.get(family.kind, (("", "value"),)):
                found.update({head + name + suffix: SampleName(family, age, part, dialect) for head in heads})
    return found


@frozen
class Features:
    """Features that the arguments switch on and that change the meaning of readings.

    ``lora``: adapters are served, for whose slots requests may wait. ``kv_role``: role in the exchange of KV blocks
    (kv_producer, kv_consumer, kv_both; "" = unknown role; None = no exchange). ``has_peer``: it exchanges them with
    servers, not with a tier or a store (None = unknown). ``waits_for_blocks``: requests may wait for blocks from
    elsewhere, or finished ones until others have fetched theirs. ``whole_prompts``: a prompt is computed as a whole,
    without a gauge that moves.
    """

    lora: bool = False
    kv_role: str | None = None
    waits_for_blocks: bool = False
    whole_prompts: bool = False
    has_peer: bool | None = False

    def in_pool(self, pool: EnginePool) -> Features:
        """The same, with the side that the engine's pool is on: the arguments of most pairs say kv_both, or are not
        visible.
        """
        kv_role = KV_ROLES.get(pool.role)
        if kv_role is None:
            return self
        unseen = self.kv_role is None and pool.source == LABEL
        return replace(self, kv_role=kv_role, waits_for_blocks=self.waits_for_blocks or unseen)


@frozen
class Pool:
    """Settings that determine the KV pool of one engine. ``bytes``: per GPU, where set directly; else ``blocks`` of
    ``block_size`` tokens with elements of ``dtype`` ("auto" = the model's).
    """

    bytes: float | None = None
    blocks: int | None = None
    block_size: int | None = None
    dtype: str = "auto"


@frozen
class Tier:
    """KV memory beyond the GPU's. ``configured``: None = unknown. ``size``: of its part in host memory, in the unit in
    which the server counts what it moves (bytes, tokens or blocks); ``tokens``: in one such unit.
    """

    configured: bool | None = None
    size: float | None = None
    tokens: float | None = None


@frozen
class Known:
    """Inputs of one engine's limits: ``args`` of the command line, ``logged`` of the start-up log, ``facts`` of
    start-up lines (``model.log_events.FACTS``), and the latest readings.
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
        """Both arguments; the logged ones take precedence."""
        return self.args if self.logged is None else self.args.merged(self.logged)


_PREEMPTION: Final = frozenset({"preemption", "preemptions", "preempted"})


def option(name: str) -> str:
    """``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineDialect:
    """One inference server. ``name``: in data and settings; ``title``: in sentences."""

    name: str
    title: str

    # --- pods and command lines: is a container this engine's server, and with which arguments
    may_start: Callable[[Sequence[str], Mapping[str, str]], bool] = lambda *_: False
    """Whether a command line, or a variable it may use, might start the server. Cheap."""
    read_command: Callable[..., Command] = lambda *_: Command(EngineArgs(), False)
    """Reads a container's command followed by its args and, if given, its environment (literal values only). Never
    raises.
    """
    of_image: Callable[[str], bool] = lambda *_: False
    """Whether an image (lower case, ``registry/path/name:tag``, without digest) contains the server; a path may
    contain anything.
    """
    host: Callable[[str, Sequence[str], Mapping[str, str], EngineArgs], Host | None] = lambda *_: None
    """The program around the server that publishes its metrics, from the image, the command line and its variables."""
    takes_words: Callable[[Sequence[str], EngineArgs], bool] = lambda *_: False
    """Whether words for the image's entry point are certainly arguments of the server."""
    image_version: Callable[[str, str], str | None] = lambda *_: None
    """The server's version, from an image's name and tag."""
    process_title: str = ""
    """How the titles begin that its processes give themselves; "" = none."""
    environment: tuple[str, ...] = ()
    """Prefixes of the variables that the server reads."""
    default_port: int = 8000
    default_path: str = "/metrics"
    port_names: tuple[str, ...] = ()
    """Names of a container port that mean the server's, beside the usual ones."""
    endpoints: Callable[[EngineArgs], Endpoints] = lambda *_: Endpoints()

    # --- the metrics page
    samples: Mapping[str, SampleName] = field(default_factory=dict)
    """Every sample name that is read (``series.table``)."""
    identify: Callable[[Mapping[str, str]], tuple[str | None, str | None]] = lambda labels: (
        labels.get("model_name"),
        None,
    )
    """(model, engine) of a series by its labels; a series without a model belongs to no engine."""
    repeated_by: frozenset[str] = frozenset()
    """Labels that distinguish series with the same value of one engine; any other difference is a collision."""
    config_labels: frozenset[str] = frozenset()
    """Labels of ``config`` families that are kept, as ``EngineReading.cache_config``."""
    metrics_switch: str = ""
    """With or without which flag the server publishes metrics; "" = always."""
    own_aborts: frozenset[str] = frozenset()
    """Flavours of which it was tried that clients that hang up do not count as aborted, so that aborts are the server's
    doing.
    """
    flavour: Callable[[PageText, Sequence[EngineReading]], str | None] = lambda *_: None
    """Kind of server in the dialect's words, from the text and its engines of this dialect; None = unknown."""

    pauses: Mapping[str, str] = field(default_factory=dict)
    """Path that tells whether the server was told to stand still -> path that ends it."""

    # --- the log
    log_words: tuple[str, ...] = ()
    """Every recognised line contains one of these: a cheap first test."""
    strip: Callable[[str], str] = lambda line: line
    """The message of a log line without prefixes."""
    recognise: Callable[[str], LogEvent | None] = lambda *_: None
    """The event of a stripped line."""

    # --- what may leave the node: only what is known to be no secret
    public_words: Callable[[EngineArgs], tuple[str, ...]] = lambda *_: ()
    """A command line rebuilt from the public part of its arguments."""
    public_arguments: Callable[[Mapping[str, str | None]], Mapping[str, str]] = lambda *_: {}
    """Values of arguments that may be named, with their public part."""
    public_environment: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda *_: {}
    """The server's own variables, with public values."""
    public_line: Callable[[str], str | None] = lambda *_: None
    """The public part of a recognised log line; ``None`` for any other."""

    # --- limits and capacity
    limits: Callable[[Known], Mapping[str, Limit]] = lambda *_: {}
    """Every known limit of ``model.state.LIMITS``, from its best source."""
    default_limits: Callable[[str | None, str | None, float | None], Mapping[str, float]] = lambda *_: {}
    """Defaults by version, GPU name ("cpu" = none) and GPU bytes; missing = unknown."""
    not_limits: frozenset[str] = frozenset()
    """Names of ``model.state.LIMITS`` that ``limits`` leaves out on purpose: arguments that the server has, but that do
    not bound what they bound elsewhere.
    """
    no_number: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Values of a limit that leave it to the server, or switch it off."""
    one_request_fits: bool = False
    """Whether it refuses to start when its KV cache holds no request of ``max_model_len``."""
    step_holds_batch: bool = False
    """Whether it refuses to start with ``max_num_batched_tokens`` below ``max_num_seqs``."""
    truncation: str = ""
    """The argument, or the part of one, by which too long prompts are truncated silently; "" = none."""
    silent: Callable[[EngineArgs], bool] = lambda *_: False
    """Whether the arguments certainly leave its metrics switched off."""
    reference_version: str = ""
    """The release whose defaults apply where no version is given."""
    capacity_tokens: Callable[[EngineReading, int], float | None] = lambda *_: None
    """Tokens that one engine's KV cache holds."""
    block_size: Callable[[EngineReading], float | None] = lambda *_: None
    """Tokens in a KV block."""
    pool: Callable[[EngineArgs, EngineReading | None, int], Pool] = lambda *_: Pool()
    tier: Callable[[EngineArgs, EngineReading | None], Tier] = lambda *_: Tier()
    tier_mistake: Callable[[EngineArgs], str] = lambda *_: ""
    """Why arguments of a tier give none, or another one than they seem to; "" = they do."""
    features: Callable[[EngineArgs, str | None, Sequence[str]], Features] = lambda *_: Features()
    """From the arguments, the flavour, and the names of present gauges and page values."""

    # --- names in advice and verdicts
    flag: Callable[[str], str] = option
    """The flag of a limit or another common argument; "" = none."""
    tier_flags: Mapping[str, str] = field(default_factory=dict)
    """How a KV tier in host memory is asked for (``add``, of ``gib`` GiB), made larger, given less to store, and taken
    away (``larger``, ``less``, ``off``); "" = none.
    """
    flags_since: Mapping[str, str] = field(default_factory=dict)
    """The first release of a flag, by argument."""
    deferred_since: str = ""
    """The first release that publishes how many requests wait for something other than capacity; "" = none."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Its own words for preemption, preemptions and preempted."""

    def called(self, name: str) -> str:
        """Name of a common argument, or of one of ``words``, in sentences."""
        if name in _PREEMPTION:
            return self.words.get(name, name)
        return self.flag(name).removeprefix("--").replace("-", "_") or name

    # --- manifests and stored series
    options: Options = field(default_factory=lambda: Options({}, frozenset()))
    """Its options, by which a command line is read and misspelt names are found."""
    series_pattern: str = ""
    """Regular expression of its series' names, for queries to Prometheus."""
    series_labels: frozenset[str] = frozenset()
    """Labels by which series of one endpoint differ, beside ``model_name`` and those of Prometheus' client."""


class Owner(NamedTuple):
    """``replica``: Ray's identifier of the server, new at each start. ``origin``: the pod or address from which a
    federation or OpenTelemetry collector got the series. Both "" = the endpoint is the server's own.
    """

    replica: str = ""
    origin: str = ""


PAGE_ITSELF = Owner()


def owner_of(labels: Mapping[str, str]) -> Owner:
    """The server by a series' labels: ReplicaId, else WorkerId, else pod or instance."""
    replica = labels.get("ReplicaId") or labels.get("WorkerId")
    if replica:
        return Owner(replica=replica)
    instance = labels.get("instance", "")
    pod = labels.get("pod") or labels.get("k8s_pod_name")
    if not pod:
        return Owner(origin=instance) if instance else PAGE_ITSELF
    namespace = labels.get("namespace") or labels.get("k8s_namespace_name")
    _, colon, port = instance.rpartition(":")  # the address changes with each start of the pod, its port does not
    return Owner(origin=f"{namespace}/{pod}{colon}{port}" if namespace else f"{pod}{colon}{port}")
