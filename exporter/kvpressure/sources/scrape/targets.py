"""Which metrics pages to read: the ``--engine.target`` option.

::

    [NAMESPACE/POD=]URL[;KEY=VALUE]...

``URL`` is ``http://host:port/path``, ``https://...`` or just ``host`` or ``host:port``. Without a scheme it is http
on the engine's own port (vLLM: 8000), with a scheme the port is that scheme's usual one; the path is ``/metrics``.
Keys:

* ``namespace``, ``pod``, ``container``: the identity of the engine's series. Without a pod, ``host:port`` stands in
  for it, so that two targets never share an identity.
* ``gpus``: UUIDs, separated by commas, of the GPUs that the engine runs on.
* ``tls``: ``verify`` (default) or ``insecure``; ``ca``: a file with the certificates to trust. For https only.
* ``model-config``: the model's ``config.json``, its directory, or a published name, where ``args`` does not name it.
* ``kv-events``: ``tcp://HOST:PORT`` where the engine (of several data-parallel ranks: the first) publishes KV events,
  and after a comma where it sends lost ones again; needs the extra ``events``.
* ``args``: the engine's command line, quoted as in a shell. Misspelt options and values that cannot be read are
  refused.

Example: ``prod/chat-0=http://10.0.0.5:8000;container=vllm;gpus=GPU-1f,GPU-2e;args=--max-num-seqs 64``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from kvpressure.engines.mistakes import mistake
from kvpressure.engines.registry import default
from kvpressure.errors import InputError, shown
from kvpressure.model.pools import EnginePool, Workload, pool_of
from kvpressure.sources.kvevents.addresses import EventsEndpoint, endpoint_of, endpoint_of_option

DEFAULT_PORT: Final = default().default_port  # where nothing says what the server is
DEFAULT_PATH: Final = default().default_path
MAX_PATH_CHARS: Final = 512
ADDRESSES: Final = "http://HOST[:PORT][/PATH], https://..., HOST or HOST:PORT"
KEYS: Final = ("namespace", "pod", "container", "gpus", "tls", "ca", "model-config", "kv-events", "args")

_OWNER: Final = re.compile(r"([a-z0-9][a-z0-9-]*)/([a-z0-9][a-z0-9.-]*)=")
# Wherever the @ is: with a slash too many or too few, what stands before it would be a path, which is published.
_CREDENTIALS: Final = re.compile(rf"(?:(?!;\s*(?:{'|'.join(KEYS)})\s*=).)*@", re.DOTALL)
_SEMICOLON: Final = re.compile(";")
_NEXT_KEY: Final = re.compile(rf";(?=\s*(?:{'|'.join(KEYS)})\s*=)")
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f:.]+")
_PATH: Final = re.compile(r'/[!"$-~]*')
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_GPU: Final = re.compile(r"[!-~]{1,128}")


def _refused(what: str, allowed: str) -> InputError:
    """The error for a target that cannot be used."""
    return InputError(f"{what}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Target:
    """One metrics endpoint and what is known about its engine.

    ``version``: the server's; ``dialect``: its name; both where discovery knows them. ``ca``: file of certificates to
    trust instead of the system's; ``verify`` False accepts any certificate. ``model_config``: a model's
    ``config.json`` or name, "" = none. ``group``, ``pool``, ``args_source``, ``assumed``: as in ``Scrape``. ``uid``: of
    the pod, "" = named by hand. ``kv_events``: ``None`` = none. Raises ``InputError`` for an address that cannot be
    requested.
    """

    host: str
    port: int = DEFAULT_PORT
    path: str = DEFAULT_PATH
    scheme: str = "http"
    namespace: str = ""
    pod: str = ""
    container: str = ""
    gpus: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    verify: bool = True
    ca: str | None = None
    model_config: str = ""
    version: str | None = None
    dialect: str = ""
    group: str = ""
    uid: str = ""
    pool: EnginePool | None = None
    args_source: str = "args"
    assumed: bool = False
    kv_events: EventsEndpoint | None = None
    name: str = field(init=False, repr=False, compare=False)  # the URL; it identifies the target

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.scheme}://{self.address}{self.path}")
        if self.scheme not in ("http", "https"):
            raise _refused(f"target {shown(self.name)} has scheme {shown(self.scheme)}", ADDRESSES)
        if not _HOST.fullmatch(self.host) or len(self.host) > 253 or not 0 < self.port < 65_536:
            raise _refused(f"target {shown(self.name)} has no usable host or port", ADDRESSES)
        if not _PATH.fullmatch(self.path) or ".." in self.path or len(self.path) > MAX_PATH_CHARS:
            raise _refused(
                f"target {shown(self.address)}: path {shown(self.path)} cannot be used",
                f"printable ASCII without '..' and '#', at most {MAX_PATH_CHARS} characters",
            )

    @property
    def address(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(text: str) -> Target:
    """The target of one ``--engine.target`` value. Raises ``InputError``."""
    owner = _OWNER.match(text)
    options = {"namespace": owner[1], "pod": owner[2]} if owner else {}
    address = text[owner.end() if owner else 0 :]
    if _CREDENTIALS.match(address):
        raise _refused("the address carries credentials", "a URL without user and password (in a path, %40 for @)")
    url, _, rest = address.partition(";")
    where = f"target {shown(text.partition(';')[0])}"  # not its options: args may hold a secret
    for key, value in _options(where, rest):
        if key in options:
            raise _refused(f"{where} gives {key} twice", "each key once")
        options[key] = value
    scheme, host, port, path = _parse_url(url.strip())
    target = Target(
        host,
        port,
        path,
        scheme,
        namespace=_checked(where, "namespace", options),
        pod=_checked(where, "pod", options),
        container=_checked(where, "container", options),
        gpus=_gpus(where, options.get("gpus", "")),
        args=_split_args(where, options.get("args", "")),
        verify=_verify(where, scheme, options),
        ca=options.get("ca"),
        model_config=options.get("model-config", ""),
    )
    pod, args = target.pod or target.address, default().read_command(target.args).args
    role = default().features(args, None, ()).kv_role
    events = _kv_events(where, options["kv-events"]) if "kv-events" in options else endpoint_of(args)
    return replace(target, pod=pod, pool=pool_of(pod, Workload(), role), kv_events=events)


def _options(where: str, rest: str) -> Iterator[tuple[str, str]]:
    """Key and value of each option; ``args`` ends where another key begins, and may hold other semicolons."""
    while rest:
        key, equals, value = rest.partition("=")
        key = key.strip()
        if not equals or key not in KEYS:
            raise _refused(
                f"{where} has {shown(key[:20])} after the URL", "KEY=VALUE with KEY one of " + ", ".join(KEYS)
            )
        end = _NEXT_KEY.search(value) if key == "args" else _SEMICOLON.search(value)
        rest = value[end.end() :] if end else ""
        yield key, (value[: end.start()] if end else value).strip()


def _parse_url(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path."""
    bare = "://" not in url
    if not url.isprintable() or " " in url:  # urlsplit would silently drop some of these
        raise _refused(f"the address {shown(url)} has blanks or control characters", ADDRESSES)
    try:
        parts = urlsplit(f"http://{url}" if bare else url)
        port = parts.port
    except ValueError:
        raise _refused(f"target {shown(url)} has no usable address", ADDRESSES) from None
    if port is None:
        port = DEFAULT_PORT if bare else 443 if parts.scheme == "https" else 80
    path = parts.path if parts.path not in ("", "/") else DEFAULT_PATH
    path += (f"?{parts.query}" if parts.query else "") + (f"#{parts.fragment}" if parts.fragment else "")
    return parts.scheme, parts.hostname or "", port, path


def _checked(where: str, key: str, options: Mapping[str, str]) -> str:
    value = options.get(key, "")
    if value and not _NAME.fullmatch(value):
        raise _refused(f"{where} has {key} {shown(value)}", "a Kubernetes name")
    return value


def _gpus(where: str, value: str) -> tuple[str, ...]:
    gpus = tuple(gpu.strip() for gpu in value.split(",")) if value else ()
    if not all(_GPU.fullmatch(gpu) for gpu in gpus):
        raise _refused(f"{where} has gpus {shown(value)}", "GPU UUIDs separated by commas")
    return gpus


def _verify(where: str, scheme: str, options: Mapping[str, str]) -> bool:
    policy = options.get("tls", "verify")
    if policy not in ("verify", "insecure"):
        raise _refused(f"{where} has the unknown option {shown(f'tls={policy}')}", "tls=verify, tls=insecure")
    if scheme != "https" and ("tls" in options or "ca" in options):
        raise _refused(
            f"{where} has tls= or ca=, but its address does not start with https://",
            "tls and ca with an https URL",
        )
    if "ca" in options and not os.path.isfile(options["ca"]):  # noqa: PTH113 - Path raises for a name that is too long
        raise _refused(f"{where} names the certificate file {shown(options['ca'])}", "an existing file")
    return policy == "verify"


def _kv_events(where: str, value: str) -> EventsEndpoint:
    endpoint = endpoint_of_option(value)
    if endpoint is None:
        raise _refused(f"{where} has kv-events {shown(value)}", "tcp://HOST:PORT, or two of them with a comma")
    return endpoint


def _split_args(where: str, value: str) -> tuple[str, ...]:
    import shlex

    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        raise _refused(
            f"{where} has args that a shell could not split ({error})", "a command line with closed quotes"
        ) from None
    if (found := mistake(words)) is not None:
        meant = f" (did you mean {found.meant}?)" if found.meant else ""
        raise _refused(f"{where}: {found.what}{meant}", found.allowed)
    return words
