"""``kvpressure mitigate``: the emergency plan with values for this server, and the check whether it helped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from kvpressure.advice.action import in_namespace, workload
from kvpressure.advice.limits import MAX_REJECTED
from kvpressure.advice.plan import pressure_plan
from kvpressure.errors import InputError
from kvpressure.model.state import EngineState
from kvpressure.publish.collector import fine, worst_first
from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.toolbox import fetch, inputs, mitigation_check, mitigation_report
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.option_values import above_zero
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kvpressure mitigate http://10.0.0.5:8000 --args='--max-num-seqs 256 --max-num-batched-tokens 8192'
  kvpressure mitigate incident.jsonl.gz --edge
  kvpressure mitigate -n inference --workload deploy/chat
      reads the pods and what made them through kubectl (get, logs)
  kvpressure mitigate --exporter http://node-1:9846 --pod chat-0
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
    output.add_argument("--format", choices=("text", "json"), default="text")
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
    found = inputs.open_inputs(options, thresholds, for_plan=True)
    chosen, *others = sorted((case.view for case in found.cases), key=lambda view: worst_first(view.engine))
    _print(chosen, [view for view in others if not fine(view.engine)], options, thresholds, found.again)
    return 0 if chosen.diagnosis.verdict == mitigation_report.PRESSURE else 1


def _print(
    engine: EngineView, others: Sequence[EngineView], options: argparse.Namespace, thresholds: Thresholds, again: str
) -> None:
    plan = pressure_plan(engine.plan_input, thresholds, _workload(engine.engine, options), options.max_rejected)
    if options.format == "json":
        print(json.dumps(mitigation_report.as_json(engine, others, plan, again), indent=2))
        return
    if engine.diagnosis.verdict != mitigation_report.PRESSURE:
        print("\n".join(mitigation_report.not_pressure(engine, others, again)))
        if not options.anyway:
            print("(the plan nevertheless: --anyway)")
            return
        print()
    if options.edge:
        print(mitigation_report.as_gateway_configuration(engine, others, plan))
    else:
        print(mitigation_report.as_text(engine, others, plan))


def _workload(engine: EngineState, options: argparse.Namespace) -> tuple[str, ...]:
    """What made the engine's pod, in words of kubectl; by its kind alone where the cluster is not read."""
    made_by = ""
    if options.namespace and not options.prometheus:
        from kvpressure.toolbox.kubectl import Kubectl
        from kvpressure.toolbox.workload import of_pod

        made_by = of_pod(Kubectl(options.context), engine.key.namespace, engine.key.pod)
    return (*in_namespace(engine.key), made_by) if made_by else workload(engine)


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
