"""``kvpressure audit``: the prevention checklist against a real deployment."""

from __future__ import annotations

import argparse
import sys

from kvpressure import redaction
from kvpressure.engines.registry import dialects
from kvpressure.errors import InputError
from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.toolbox import audit_report, manifests
from kvpressure.toolbox.audit_report import Audited
from kvpressure.toolbox.audit_subject import Subject, shape_of
from kvpressure.toolbox.checklist import checklist
from kvpressure.toolbox.inputs import arguments, engine_version, given_gpu, model_shape
from kvpressure.toolbox.manifests import ServerContainer, Servers
from kvpressure.toolbox.option_values import whole_number
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kubectl get deploy -n inference -o yaml | kvpressure audit - --gpu H100:80 --context 3000
  helm template chat ./chart | kvpressure audit - --format json
  kvpressure audit chat.yaml code.yaml --all
  docker compose config | kvpressure audit - --gpu L40S:48
  kvpressure audit --args='vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64' --vllm-version 0.11.2 --gpu L40S:48

A server's defaults depend on its version and the GPU. They are taken from the image's tag and the node selector if possible.
Exit status: 0 no item fails, 1 an item fails, 2 the input cannot be used, or a part of it cannot be judged.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="files of Kubernetes or Compose (YAML or JSON; - = standard input)",
    )
    parser.add_argument(
        "--args",
        metavar="ARGS",
        type=arguments,
        help="the server's command line as one quoted argument, instead of a file",
    )
    for engine in dialects():
        parser.add_argument(
            f"--{engine.name}-version",
            dest="version",
            metavar="V",
            type=engine_version,
            help=f"{engine.title} version, e.g. {engine.reference_version or '1.0.0'} (default: the image's tag)",
        )
    parser.add_argument(
        "--gpu", metavar="NAME:GiB", type=given_gpu, help="the GPU, e.g. H100:80; default: the GPU of the node selector"
    )
    parser.add_argument("--model-config", metavar="MODEL", help="config.json, a model's directory, or a known name")
    parser.add_argument(
        "--context",
        metavar="TOKENS",
        type=whole_number(),
        help="length of a usual request (prompt plus output), in tokens",
    )
    parser.add_argument(
        "--demanding",
        action="store_true",
        help="the load is long-context or bursty; require the lower gpu_memory_utilization that such load needs",
    )
    parser.add_argument("--all", action="store_true", help="list also what passes and what cannot be seen")
    parser.add_argument("--thresholds", metavar="FILE", help="file with thresholds to use instead of the built-in ones")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Check and print. Raises ``InputError`` for unusable input."""
    thresholds = load(options.thresholds)
    read = _read(options)
    audited = [_audited(_subject(server, options, thresholds, read.servers)) for server in read.servers]
    text = audit_report.as_text(audited, options.all)
    answer(options.format, audit_report.as_json(audited, read.unread), text)
    if read.unread:
        print(f"kvpressure audit: limits not visible, so not judged: {manifests.listed(read.unread)}", file=sys.stderr)
    return 1 if any(server.of("fail") for server in audited) else 2 if read.unread else 0


def _read(options: argparse.Namespace) -> Servers:
    if bool(options.files) == bool(options.args):
        found = "both files and --args were given" if options.files else "nothing to audit"
        raise InputError(f"{found}; allowed: FILE..., - (standard input), or --args='vllm serve ...'")
    if options.args:
        return Servers((manifests.from_command_line(options.args),), ())
    return manifests.read_all(options.files)


def _subject(
    server: ServerContainer,
    options: argparse.Namespace,
    thresholds: Thresholds,
    servers: tuple[ServerContainer, ...],
) -> Subject:
    shape = model_shape(options.model_config) if options.model_config is not None else shape_of(server)
    return Subject(
        server,
        thresholds,
        shape,
        options.gpu or server.gpu,
        options.version or server.version,
        options.context,
        options.demanding,
        tuple(other for other in servers if other is not server),
    )


def _audited(subject: Subject) -> Audited:
    used, model = subject.gpu, subject.server.args.model
    basis = (
        f"{subject.dialect.title} {subject.version or 'of unknown version'}, GPU"
        f" {used.name + f' {used.memory_bytes / 2**30:.3g} GiB' if used else 'unknown'}, model"
        f" {redaction.value(model or 'not named')}{'' if subject.shape else ' (shape unknown)'}"
    )
    return Audited(subject.server.title, basis, checklist(subject))
