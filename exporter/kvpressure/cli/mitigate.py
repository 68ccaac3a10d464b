"""``kvpressure mitigate``: the emergency plan with values for this server, and the check whether it helped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from kvpressure.advice.action import workload
from kvpressure.advice.caps import MAX_REJECTED
from kvpressure.advice.plan import pressure_plan
from kvpressure.errors import InputError
from kvpressure.publish.collector import fine, worst_first
from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.toolbox import fetch, inputs, manifests, mitigation_check, mitigation_report, patches
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.manifests import ServerContainer
from kvpressure.toolbox.option_values import above_zero
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kvpressure mitigate http://10.0.0.5:8000 --args='--max-num-seqs 256 --max-num-batched-tokens 8192'
  kvpressure mitigate incident.jsonl.gz --edge
  kvpressure mitigate -n inference --workload deploy/chat --format patch > patch.yaml
      reads pods and workload through kubectl (get, logs) and prints a patch of the workload
  kubectl get deploy chat -n inference -o yaml > chat.yaml
  kvpressure mitigate --exporter http://node-1:9846 --pod chat-0 --manifest chat.yaml --format patch > patch.yaml
  kvpressure mitigate --verify http://10.0.0.5:8000
      watch whether the server recovers (up to --verify-seconds)

Of several engines it takes the one in most trouble, as diagnose does. Nothing is ever applied. Exit status: 0 a plan (or
recovered), 1 the verdict of that engine is not KV pressure (or not recovered), 2 the input cannot be used.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    inputs.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=("text", "json", "patch"), default="text")
    output.add_argument(
        "--manifest",
        metavar="FILE",
        help="file with the workload to patch (kubectl get deploy NAME -o yaml; - = standard input); not needed"
        " with -n",
    )
    output.add_argument(
        "--container",
        metavar="NAME",
        help="container to patch if the workload has several: its name, or TEMPLATE/NAME (leaderTemplate/vllm)",
    )
    output.add_argument(
        "--max-rejected",
        type=above_zero(1),
        default=MAX_REJECTED,
        metavar="SHARE",
        help=f"largest share of requests that the caps may reject or cut short (default {MAX_REJECTED:g})",
    )
    output.add_argument("--edge", action="store_true", help="print only configuration for Envoy Gateway and nginx")
    output.add_argument("--anyway", action="store_true", help="print the plan even if the verdict is not KV pressure")
    check = parser.add_argument_group("verification")
    check.add_argument("--verify", metavar="URL", help="watch this server for recovery instead of printing a plan")
    check.add_argument(
        "--verify-seconds", type=above_zero(), default=180.0, metavar="S", help="how long to watch (default 180)"
    )


def run(options: argparse.Namespace) -> int:
    """Plan or verify. Raises ``InputError`` for unusable input."""
    thresholds = load(options.thresholds)
    if options.verify is not None:
        return _verify(options, thresholds)
    cluster = bool(options.namespace) and not options.prometheus
    if options.format == "patch" and not options.manifest and not cluster:
        raise InputError(
            "--format patch: the full argument list of the workload is needed, because a patch replaces all arguments;"
            " give --manifest FILE (kubectl get deploy NAME -o yaml) or -n NAMESPACE"
        )
    if options.container and options.manifest is None and not cluster:
        raise InputError("--container: only together with --manifest FILE or -n NAMESPACE")
    server = _server(options.manifest, options.container) if options.manifest is not None else None
    found = inputs.open_inputs(options, thresholds, to_the_end=True)
    chosen, *others = sorted((case.view for case in found.cases), key=lambda view: worst_first(view.engine))
    if cluster and server is None:
        server = _of_cluster(chosen, options)
    _print(chosen, [view for view in others if not fine(view.engine)], options, thresholds, server, found.again)
    return 0 if chosen.verdict == mitigation_report.PRESSURE else 1


def _server(path: str, container: str | None) -> ServerContainer:
    return manifests.choose(manifests.read_all([path]).servers, container, f"--manifest: {path}")


def _of_cluster(engine: EngineView, options: argparse.Namespace) -> ServerContainer | None:
    """The workload that runs ``engine``; None if it is unavailable and only its name would be shown."""
    from kvpressure.toolbox import workload
    from kvpressure.toolbox.kubectl import Kubectl

    try:
        return workload.of_pod(
            Kubectl(options.context),
            engine.engine.key.namespace,
            engine.engine.key.pod,
            engine.engine.container,
            options.container,
        )
    except InputError:
        if options.format == "patch" or options.container:
            raise
        return None


def _print(
    engine: EngineView,
    others: Sequence[EngineView],
    options: argparse.Namespace,
    thresholds: Thresholds,
    server: ServerContainer | None,
    again: str,
) -> None:
    plan = pressure_plan(engine.plan_input, thresholds, _workload(engine, server), options.max_rejected)
    note = patches.other_server(server, engine.engine.key) if server is not None and options.manifest else ""
    if options.format == "json":
        print(json.dumps(mitigation_report.as_json(engine, others, plan, again, note), indent=2))
        return
    if options.format == "patch" and server is not None:
        if not plan.values:
            raise InputError(
                f"--format patch: there is no value to set for {engine.name} ({engine.verdict}); --format text prints"
                " the reason"
            )
        print(mitigation_report.as_patch(engine, others, plan, server, note))
        return
    if note:
        print(f"note: {note}\n")
    if engine.verdict != mitigation_report.PRESSURE:
        print("\n".join(mitigation_report.not_pressure(engine, others, again)))
        if not options.anyway:
            print("(the plan nevertheless: --anyway)")
            return
        print()
    if options.edge:
        print(mitigation_report.as_gateway_configuration(engine, others, plan))
    else:
        print(mitigation_report.as_text(engine, others, plan))


def _workload(engine: EngineView, server: ServerContainer | None) -> tuple[str, ...]:
    if server is None or server.kind in patches.SET_BY_HAND:
        return workload(engine.engine)
    return (*(("-n", server.namespace) if server.namespace else ()), f"{server.kind.lower()}/{server.name}")


def _verify(options: argparse.Namespace, thresholds: Thresholds) -> int:
    if inputs.given(options):
        raise InputError("--verify: not together with another input; give only --verify URL")
    target = fetch.target_of(options.verify, "--verify")
    if options.args:
        target = replace(target, args=target.args or options.args)
    outcome = mitigation_check.verify(target, options.verify_seconds, thresholds)
    checks = [{"name": check.name, "value": check.value, "text": check.text} for check in outcome.checks]
    document = {**asdict(replace(outcome, checks=())), "checks": checks}
    answer(options.format, document, "\n".join(mitigation_report.outcome_lines(outcome)))
    return 0 if outcome.recovered else 1
