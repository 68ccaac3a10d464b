"""A ``kubectl patch`` that sets arguments of vLLM in its workload; nothing is applied.

Lists are replaced as a whole, so a patch has the container's whole ``args`` (and ``command``). Built-in workloads
take a strategic merge patch, which finds the container by name; custom resources (LeaderWorkerSet) a JSON patch, which
finds it by index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvpressure import printable
from kvpressure.advice.action import is_pod
from kvpressure.engines.command import CUT
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.model.readings import EngineKey
from kvpressure.redaction import REDACTED
from kvpressure.toolbox import changed_flags
from kvpressure.toolbox.manifests import ServerContainer

_STRATEGIC: Final = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
SET_BY_HAND: Final = {
    "": "the service's command",
    "LLMInferenceService": "the container's ADDITIONAL_ARGS variable, or its args",
}
"""Where arguments are set that no patch of a command line sets: by kind, "" = a service of Docker Compose."""
_SHORT: Final = {"Deployment": "deploy", "LeaderWorkerSet": "lws"}
_BRINGS_ARGUMENTS: Final = (
    "ARGS",
    "ARGUMENTS",
    "OPTS",
    "OPTIONS",
    "FLAGS",
    "MAX_NUM_SEQS",
    "MAX_NUM_BATCHED_TOKENS",
    "GPU_MEMORY_UTILIZATION",
)  # how images name variables that become arguments
_POD_PREFIX: Final = 40  # letters of a workload's name that the names of its pods have; Kubernetes cuts long ones
_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)")


def as_patch(server: ServerContainer, values: Mapping[str, float]) -> tuple[str, Any]:
    """(``strategic`` or ``json``, content). Raises ``InputError`` when a patch of the workload
    cannot set the values.
    """
    _refuse(server, changed_flags.as_words(values, server.dialect))
    try:
        changed = changed_flags.with_values(server.argv, values, server.env, server.dialect)
    except InputError as error:
        raise InputError(f"{server.title}: {error}{_elsewhere(server)}") from None
    length = server.command_length
    parts = {"command": (server.argv[:length], changed[:length]), "args": (server.argv[length:], changed[length:])}
    new = {name: list(after) for name, (before, after) in parts.items() if before != after}
    listed = next(
        (part for part in reversed(server.pointer) if isinstance(part, str)), "containers"
    )  # or initContainers
    if server.kind in _STRATEGIC:
        return "strategic", {"spec": {"template": {"spec": {listed: [{"name": server.container, **new}]}}}}
    where = "".join(f"/{part}" for part in server.pointer)
    guard = {"op": "test", "path": f"{where}/name", "value": server.container}
    return "json", [guard, *({"op": "add", "path": f"{where}/{name}", "value": words} for name, words in new.items())]


def _refuse(server: ServerContainer, words: Sequence[str]) -> None:
    """Raise where a patch would not reach vLLM, or would be overwritten."""
    if server.kind == "Pod":
        raise InputError(
            f"{server.title}: the arguments of a running pod cannot be changed; name the workload that created the"
            " pod instead"
        )
    if server.kind in SET_BY_HAND:
        raise InputError(f"{server.title}: not patched; set {' '.join(words)} in {SET_BY_HAND[server.kind]}")
    if not server.argv:
        raise InputError(
            f"{server.title}: the workload has no command line, the image sets it{_elsewhere(server)}; edit the"
            " workload by hand"
        )
    if any(REDACTED in word or CUT in word for word in server.argv):
        raise InputError(
            f"{server.title}: some values of the command line are redacted; give the original manifest (--manifest)"
        )
    hidden, seen = _hidden(server)
    if hidden:
        told = ", ".join(f"{name} from {server.variables.get(name, 'elsewhere')}" for name in hidden)
        raise InputError(
            f"{server.title}: a variable adds arguments ({told}), which a patch of the workload does not reach;"
            " set the values in that variable"
        )
    if not seen:
        raise InputError(
            f"{server.title}: a script hides part of the command line{_elsewhere(server)}; edit the command line by"
            " hand"
        )


def _hidden(server: ServerContainer) -> tuple[list[str], bool]:
    """(variables without a literal value where options may be, whether the rest of the command line is visible). A
    variable as an option's value, or as the model, hides nothing.
    """
    unknown = sorted({name for word in server.argv for name in _VARIABLE.findall(word)} - server.env.keys())
    parse = dialect(server.dialect).read_command
    as_value = parse(server.argv, {**server.env, **{name: f"value-of-{name}" for name in unknown}}).args
    told = " ".join(value for value in as_value.values.values() if value)
    free = [name for name in unknown if f"value-of-{name}" not in told]
    as_option = parse(
        server.argv,
        {
            **server.env,
            **{name: f"--hidden-{index}=1" for index, name in enumerate(free)},
            **{name: "value" for name in unknown if name not in free},
        },
    ).args
    hidden = [name for index, name in enumerate(free) if f"hidden_{index}" in as_option.values]
    return hidden, as_value.complete or "config" in as_value.values


def other_server(server: ServerContainer, key: EngineKey) -> str:
    """A note where names show that an engine does not belong to a workload; "" = they may belong together."""
    given = [server.args.values[name] for name in ("served_model_name", "model") if name in server.args.values]
    pod = key.pod if is_pod(key) else ""
    prefix = f"{server.name}-"[:_POD_PREFIX]
    other_pod = pod and server.name and pod != server.name and not pod.startswith(prefix)
    other_namespace = key.namespace and server.namespace and key.namespace != server.namespace
    other_model = key.model_name and given and None not in given and key.model_name not in (*given, server.name)
    if not (other_pod or other_namespace or other_model):
        return ""
    where = "/".join(part for part in (key.namespace, pod) if part) or "the engine"
    return (
        f"the manifest may belong to another server: it has {server.title} with model"
        f" {next(filter(None, given), 'unknown')}; the plan is for {where} with model {key.model_name or 'unknown'}"
    )


def _elsewhere(server: ServerContainer) -> str:
    """Variables that may contain arguments and where they are set; a patch of the arguments does not reach them."""
    used = " ".join(server.argv)
    found = [
        f"{name} from {where}"
        for name, where in server.variables.items()
        if name in used or _telling(name) or name.endswith("*")
    ]
    found += [f"{name} in the container's env" for name in server.env if name in used or _telling(name)]
    return f" (variables: {', '.join(found[:6])})" if found else ""


def _telling(name: str) -> bool:
    return name.upper().endswith(_BRINGS_ARGUMENTS)


def notes(server: ServerContainer, values: Mapping[str, float]) -> Iterator[str]:
    """What to know before applying the patch."""
    if server.owner:
        yield f"managed by {server.owner}, which may undo the patch: change it there too"
    if "config" in server.args.values:
        yield "options on the command line override the file of --config"
    one = dialect(server.dialect)
    given = one.read_command(server.argv).args.values
    for name in values:
        before = given.get(name)
        if before is not None and "$" in before:
            yield f"{one.flag(name)} was {before}; the patch writes the number instead of the variable"


def command(server: ServerContainer, kind: str) -> str:
    """The shell command that applies the patch; THIS_FILE stands for its file."""
    return printable.command("kubectl", "patch", *_object(server), "--type", kind, "--patch-file", "THIS_FILE")


def rollout(server: ServerContainer) -> str:
    """The shell command that watches the rollout."""
    if server.kind in _STRATEGIC:
        return printable.command("kubectl", "rollout", "status", *_object(server))
    return printable.command("kubectl", "get", *_object(server), "-w")


def _object(server: ServerContainer) -> tuple[str, ...]:
    kind = _SHORT.get(server.kind, server.kind.lower() or "deploy")
    return f"{kind}/{server.name}", *(("-n", server.namespace) if server.namespace else ())
