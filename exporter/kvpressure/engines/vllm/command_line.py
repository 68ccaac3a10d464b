"""The command line of a vLLM container as ``EngineArgs``. Pure; see ``read``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvpressure.engines import shell
from kvpressure.engines.command import CUT, Command, Endpoints, on_first_node
from kvpressure.engines.options import read_options
from kvpressure.engines.shell import SHELLS, UNKNOWN, UNKNOWN_WORDS, base
from kvpressure.model.arguments import EngineArgs

_NOT_MODELS: Final = frozenset(
    {
        "python",
        "python3",
        "ray",
        "env",
        "tini",
        "dumb-init",
        "uv",
        "uvicorn",
        "tritonserver",
        "nsys",
        "numactl",
        "torchrun",
        "mpirun",
        "sleep",
        "exec",
    }
)
OPTIONS: Final = read_options(Path(__file__).with_name("options.json"), {})
OF_VLLM: Final = frozenset(
    {
        "model",
        "served_model_name",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "kv_cache_dtype",
        "enforce_eager",
    }
)
"""Arguments that identify words as vLLM's, whatever program they go to."""
_SERVER = re.compile(r"vllm(?<!\wvllm)(?:\s++serve\b|\.entrypoints\b)")
_WRAPPER = re.compile(r"\S*/vllm/inference_api\.py|dynamo\.vllm|huggingfaceserver")
"""Programs that run vLLM inside and set some of its arguments: KAITO, NVIDIA Dynamo's worker, KServe's Hugging Face
server.
"""
_WRAPPER_NAMES: Final = {"model_id": "model", "model_name": "served_model_name"}  # KServe's Hugging Face server
_MODULE = re.compile(r"(?:\S*[/.])?api_server(?:\.py)?")


def read(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """A container's command followed by its args, and its environment; see ``base.EngineDialect``. Never raises.

    Understands ``vllm serve MODEL``, ``python -m vllm.entrypoints...``, bare arguments of an image's entry point,
    ``sh -c "..."`` scripts, ``$(VAR)`` of Kubernetes and ``$VAR`` of the shell.
    """
    known = dict(env or {})
    tokens, script, scripted = shell.program_of(argv, known)
    servers = [command for command in script.commands if _anchor(command.words) is not None]
    bare = tokens if not scripted and base(next(iter(tokens), "")) != "ray" else ()
    args, others = shell.servers(
        servers, [_arguments(server.words, known, script.understood) for server in servers]
    ) or (_arguments(bare, known, script.understood), ())
    # "serve" alone, for an image's entry point, may be any program's, this exporter's too
    starts = bool(servers) and (list(servers[0].words[:1]) != ["serve"] or bool(OF_VLLM & args.explicit))
    certain = starts and any(map(shell.is_here, servers))
    starts = starts or names_server(argv)
    return Command(args, starts, certain, others, shell.node_of(script, args))


def names_server(argv: Sequence[str]) -> bool:
    """Whether the text contains the words that start vLLM's server."""
    text = " ".join(map(str, argv))
    return "vllm" in text and _SERVER.search(text) is not None


def _arguments(tokens: Sequence[str], env: Mapping[str, str], understood: bool) -> EngineArgs:
    """``tokens``: of a server or an image's entry point."""
    rest, model, complete = _engine_part(tokens)
    options = list(OPTIONS.read(rest))
    values = {name: value for name, value in options if name}
    if model is not None:
        values.setdefault("model", None if UNKNOWN in model else model)
    wrapped = any(map(_WRAPPER.fullmatch, tokens)) or not _WRAPPER_NAMES.keys().isdisjoint(values)
    for name, of_engine in _WRAPPER_NAMES.items():
        if name in values:
            values.setdefault(of_engine, values.pop(name))
    complete = (
        complete and understood and not wrapped and "config" not in values and not _hides_options(options, rest, model)
    )
    return EngineArgs(
        values, frozenset(values), complete, {name: value for name, value in env.items() if name.startswith("VLLM_")}
    )


def _hides_options(options: Iterable[tuple[str, str | None]], rest: Sequence[str], model: str | None) -> bool:
    """Whether a variable or an unknown word may bring further options; in place of a value a variable is taken for one
    word.
    """
    of_model = model is not None and not model.strip(UNKNOWN) and (not rest or model == UNKNOWN_WORDS)
    in_rest = any(token == CUT or (token and not token.strip(UNKNOWN)) for token in rest)
    return of_model or in_rest or not OPTIONS.explain(options)


def endpoints(args: EngineArgs) -> Endpoints:
    """Headless ranks serve nothing; with an external load balancer each data-parallel rank of the node serves on its
    own port.
    """
    port_each = args.values.get("data_parallel_multi_port_external_lb") == "True"
    serves = args.values.get("headless") != "True" and (port_each or on_first_node(args))
    ranks = args.integer("data_parallel_size_local")
    if ranks is None and not {"data_parallel_size_local", "nnodes", "data_parallel_start_rank"} & args.explicit:
        ranks = args.data_parallel_size  # all ranks are here
    return Endpoints(serves, port_each, ranks)


def _anchor(tokens: Sequence[str]) -> int | None:
    """Index of the first token after the words that start a vLLM server; None without them."""
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        if following == "serve" and base(token) in ("vllm", "vllm.entrypoints.cli.main"):
            return index + 2
        if token.startswith("vllm.entrypoints.") or _MODULE.fullmatch(token) or _WRAPPER.fullmatch(token):
            return index + 1
    return 1 if tokens[:1] == ["serve"] else None


def _engine_part(tokens: Sequence[str]) -> tuple[Sequence[str], str | None, bool]:
    """(tokens after the start words, positional model or None, whether nothing is hidden)."""
    start = _anchor(tokens)
    if start is not None:
        rest = tokens[start:]
        if rest and not rest[0].startswith("-") and rest[0] != CUT:
            return rest[1:], rest[0], True
        return rest, None, True
    if not tokens or tokens[0].startswith("-"):
        return tokens, None, bool(tokens)
    first = tokens[0]
    entry_point_model = (
        base(first) not in _NOT_MODELS | SHELLS
        and not first.endswith((".sh", ".py"))
        and (len(tokens) == 1 or tokens[1].startswith("-"))
    )
    return (tokens[1:], first, True) if entry_point_model else (tokens, None, False)
