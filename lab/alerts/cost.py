"""What do the rules cost a large fleet? ``python -m lab.alerts.cost`` (``make -C lab bench-rules``).

A real Prometheus scrapes a thousand copies of one simulated node (eight GPUs, an engine on each, at 60 % of what they
can do) and evaluates the delivered rules. When the five-minute ranges are filled, scraping and rules are switched off,
and the expression of each rule is evaluated several times over the query interface at the last moment of scraping. What
counts is the least CPU time that the process spends on one, less what a query that reads nothing costs: other work on
the machine does not count, nor a collection of garbage that happens to fall into it, nor the query interface, which
rules do not use. Together with the intervals of the groups that is CPU time a minute. Exit 1 when the budget is missed.

With ``--incident``, a tenth of the nodes then comes under more load than its engines can serve. Alerts that are active
cost more than their expressions do (texts are rendered at each evaluation), so what counts there is how long the
evaluations take, before and during the incident, on a quiet machine.

Served are only the series that some rule reads; others cost the rules nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import yaml

from kvpressure.model.readings import Snapshot, SourceHealth
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.alerts import fortnight
from lab.alerts.series import METRIC, RULES, SCRAPED_NODE, samples
from lab.demo.node import CONTAINER, NAMESPACE, PodSpec, SimulatedNode

BUDGET_SECONDS: Final = 1.0  # a minute, on one core
INCIDENT_BUDGET_SECONDS: Final = 0.5  # more, for a thousand nodes
ENGINES: Final = 8
LOAD_SHARE: Final = 0.6
OVERLOAD_SHARE: Final = 1.6
ONE_IN: Final = 10  # nodes in the incident
INCIDENT_SECONDS: Final = 300.0  # until every alert of it is active
WATCHED_SECONDS: Final = 240.0  # two evaluations of the slowest group
SCRAPE_SECONDS: Final = 15.0
FILL_SECONDS: Final = 420.0  # the five-minute ranges and the first scrape of every node
PAGES: Final = 60  # a quarter of an hour of a node's life, then again
REPEATS: Final = 7
SHOWN: Final = 20
_NODE: Final = "NODE"  # stands for the node's number in names
_SETTLE_SECONDS: Final = 20.0  # after the last scrape
_EMPTY_QUERIES: Final = 50
_RULE_SECONDS: Final = "prometheus_rule_evaluation_duration_seconds_sum"
SELECTIONS: Final = 5
_SPAN: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def states(count: int, share: float) -> Iterator[State]:
    """The states of one node at this share of its engines' capacity at ``count`` scrapes in a row, with ``_NODE`` in
    the names that differ between nodes.
    """
    now = fortnight.START
    load = replace(fortnight.LOAD, requests_per_second=share * fortnight.capacity())
    specs = [PodSpec(f"chat-{_NODE}-{index}", fortnight.ENGINE, load) for index in range(ENGINES)]
    node, pipeline, scanner = SimulatedNode(specs, lambda: now, 1), Pipeline(), Scanner()
    for tick in range(count):
        now += SCRAPE_SECONDS
        read = tuple(
            parse_scrape(
                node.metrics(name),
                target=f"http://{name}:8000/metrics",
                time=now,
                namespace=NAMESPACE,
                pod=name,
                container=CONTAINER,
                gpus=(pod.gpu.uuid,),
                args=fortnight.ARGS,
                duration_seconds=0.01,
                scanner=scanner,
            )
            for name, pod in node.pods.items()
        )
        health = {name: SourceHealth(name, up=True, last_success=now) for name in ("engines", "nvidia", "podresources")}
        state = pipeline.observe(
            Snapshot(
                time=now,
                gpus=node.gpus(),
                pages=read,
                containers=node.containers(),
                owners=node.owners(),
                logs=node.logs(),
                targets=tuple(page.target for page in read),
                health=health,
            )
        )
        yield replace(state, ticks=tick + 1)


def pages(count: int, share: float = LOAD_SHARE) -> list[str]:
    """What that node publishes."""
    texts = ("".join(f"{name} {value}\n" for name, value in samples(state)) for state in states(count, share))
    return [text.replace("GPU-", f"GPU-{_NODE}-").replace(SCRAPED_NODE, f"node-{_NODE}") for text in texts]


class Nodes(ThreadingHTTPServer):
    """Serves the nodes; Prometheus may hang up on a scrape that takes too long."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a failed scrape shows in ``up``."""


@dataclass
class Served:
    """What the nodes publish now; in an incident, one in ten publishes ``pressed``."""

    calm: Sequence[str]
    pressed: Sequence[str] = ()
    incident_since: float | None = None

    def page(self, node: str, seconds: float) -> str:
        """The page of a node."""
        if self.incident_since is None or int(node) % ONE_IN:
            return self.calm[int(seconds / SCRAPE_SECONDS) % len(self.calm)]
        return self.pressed[min(int((seconds - self.incident_since) / SCRAPE_SECONDS), len(self.pressed) - 1)]


@contextmanager
def fleet(served: Served, began: float) -> Iterator[str]:
    """The nodes as ``/<number>`` of one server; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """One scrape of one node."""
            node = self.path.strip("/")
            body = served.page(node, time.monotonic() - began).replace(_NODE, node).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = Nodes(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def groups(rules: Path) -> list[dict[str, Any]]:
    """The groups of a rule file."""
    return list(yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"])


def configuration(address: str, nodes: int) -> dict[str, Any]:
    """Prometheus' configuration: every node a target of its own."""
    targets = [
        {
            "targets": [f"node-{number:04d}:9846"],
            "labels": {"__metrics_path__": f"/{number:04d}", "node": f"node-{number:04d}"},
        }
        for number in range(nodes)
    ]
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS:g}s", "scrape_timeout": "10s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "kvpressure",
                "honor_labels": True,
                "static_configs": targets,
                "relabel_configs": [
                    {"source_labels": ["__address__"], "target_label": "instance"},
                    {"target_label": "__address__", "replacement": address},
                ],
            }
        ],
    }


@dataclass(frozen=True, slots=True)
class Server:
    """A running Prometheus, its process and its configuration file."""

    url: str
    pid: int
    configuration: Path

    def get(self, path: str) -> Any:
        """``data`` of an answer."""
        with urlopen(f"{self.url}/api/v1/{path}", timeout=120) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float:
        """The one value of a query; 0 when there is none."""
        result = self.get(f"query?query={quote(query)}")["result"]
        return float(result[0]["value"][1]) if result else 0.0

    def cpu_seconds(self) -> float:
        """What the process has used so far; the kernel counts nanoseconds for each thread."""
        return (
            sum(
                int(path.read_text(encoding="ascii").split()[0])
                for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat")
            )
            / 1e9
        )

    def rule_seconds(self) -> float:
        """What evaluations of rules have taken so far, with the texts of their alerts, one after another."""
        with urlopen(f"{self.url}/metrics", timeout=120) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(_RULE_SECONDS))

    def stop_scraping(self) -> None:
        """From now on it only answers queries."""
        self.configuration.write_text("{}", encoding="utf-8")
        os.kill(self.pid, signal.SIGHUP)
        time.sleep(_SETTLE_SECONDS)

    def seconds(self, expression: str, at: float) -> float:
        """CPU seconds of an evaluation at a moment; counted there, so that no large answer is written."""
        before = self.cpu_seconds()
        self.get(f"query?time={at}&query={quote(f'count({expression})')}")
        return self.cpu_seconds() - before


@contextmanager
def prometheus(document: dict[str, Any], program: str = "prometheus") -> Iterator[Server]:
    """A Prometheus with ``document`` as its configuration; ``program`` is the one to run."""
    with tempfile.TemporaryDirectory(prefix="kvpressure-") as folder:
        path = Path(folder, "prometheus.yaml")
        path.write_text(yaml.dump(document), encoding="utf-8")
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
            port = free.server_address[1]
        command = [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        process = subprocess.Popen(command)
        try:
            server = Server(f"http://127.0.0.1:{port}", process.pid, path)
            _await_ready(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _await_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise RuntimeError(f"prometheus ended with status {process.returncode}")
        try:
            server.value("vector(1)")
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("prometheus was not ready after a minute")


@dataclass(frozen=True, slots=True)
class Cost:
    """One rule: its group, its name, seconds an evaluation and evaluations a minute."""

    group: str
    name: str
    seconds: float
    per_minute: float

    @property
    def a_minute(self) -> float:
        """Seconds a minute."""
        return self.seconds * self.per_minute


def selecting(server: Server, at: float, nothing: float) -> float:
    """Seconds to select every series that today's rules read, each once: what no rule on these series can go below."""
    read = sorted({name for group in groups(RULES) for rule in group["rules"] for name in METRIC.findall(rule["expr"])})
    return sum(max(0.0, min(server.seconds(name, at) for _ in range(SELECTIONS)) - nothing) for name in read)


def costs(server: Server, at: float, nothing: float, repeats: int = REPEATS) -> list[Cost]:
    """Every rule, measured at a moment, in rounds, so that seconds of other work on the machine spoil one measurement
    and not all. ``nothing``: seconds of a query that reads nothing.
    """
    rules = [(group, rule) for group in groups(RULES) for rule in group["rules"]]
    rounds = [[server.seconds(rule["expr"], at) for _, rule in rules] for _ in range(repeats)]
    return [
        Cost(
            group["name"],
            rule.get("record") or f"{rule['alert']} {rule['labels']['severity']}",
            max(0.0, min(spent) - nothing),
            60.0 / (float(group["interval"][:-1]) * _SPAN[group["interval"][-1]]),
        )
        for (group, rule), spent in zip(rules, zip(*rounds, strict=True), strict=True)
    ]


def report(found: Sequence[Cost], series: float, nodes: int, version: str) -> Iterator[str]:
    """The figures, one a line."""
    yield (
        f"Prometheus {version}: {nodes} nodes, {nodes * ENGINES} GPUs and engines, {series:.0f} series that rules read"
    )
    for cost in sorted(found, key=lambda item: -item.a_minute)[:SHOWN]:
        yield f"  {1000 * cost.seconds:7.1f} ms x {cost.per_minute:.2f} a minute  {cost.name}"
    for group in dict.fromkeys(cost.group for cost in found):
        mine = [cost for cost in found if cost.group == group]
        yield f"{1000 * sum(cost.a_minute for cost in mine):8.1f} ms a minute  {group} ({len(mine)} rules)"
    together = sum(cost.a_minute for cost in found)
    yield f"together {together:.3f} s a minute of one core (budget {BUDGET_SECONDS:g} s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit 1 when the budget is missed."""
    parser = argparse.ArgumentParser(prog="python -m lab.alerts.cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000, help="how many nodes of eight engines (default: 1000)")
    parser.add_argument("--fill", type=float, default=FILL_SECONDS, help="seconds of scraping before it is measured")
    parser.add_argument(
        "--prometheus",
        default="prometheus",
        help="the program to measure, for other releases (default: the one installed)",
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"rounds of measurements (default: {REPEATS})")
    parser.add_argument(
        "--incident", action="store_true", help="what the rules cost more while a tenth of the nodes is overloaded"
    )
    options = parser.parse_args(argv)
    began = time.monotonic()
    served = Served(pages(PAGES), pages(PAGES, OVERLOAD_SHARE) if options.incident else ())
    with (
        fleet(served, began) as address,
        prometheus(configuration(address, options.nodes), options.prometheus) as server,
    ):
        time.sleep(options.fill)
        up = server.value("sum(up)")
        if up < options.nodes:
            raise RuntimeError(f"only {up:.0f} of {options.nodes} nodes are scraped")
        if options.incident:
            return _incident(server, served, began, options.nodes)
        return _measured(server, options.nodes, options.repeats)


def _incident(server: Server, served: Served, began: float, nodes: int) -> int:
    def a_minute() -> tuple[float, float]:
        before = server.rule_seconds()
        time.sleep(WATCHED_SECONDS)
        active = server.value('count(ALERTS{alertname!="KvpressureWatchdog"})')
        return (server.rule_seconds() - before) * _SPAN["m"] / WATCHED_SECONDS, active

    calm, calm_alerts = a_minute()
    served.incident_since = time.monotonic() - began
    time.sleep(INCIDENT_SECONDS)
    pressed, active = a_minute()
    engines = ENGINES * -(-nodes // ONE_IN)
    more = (pressed - calm) * 1000 / nodes
    print(f"calm: {calm:.3f} s a minute, {calm_alerts:.0f} active alerts")
    print(
        f"{engines} engines overloaded: {pressed:.3f} s, {active:.0f} active alerts, {active / engines:.2f} an engine"
    )
    print(f"{more:.2f} s a minute more for 1 000 nodes (budget {INCIDENT_BUDGET_SECONDS:g} s)")
    return 1 if more > INCIDENT_BUDGET_SECONDS else 0


def _measured(server: Server, nodes: int, repeats: int) -> int:
    series, at = server.value('count({__name__=~"kvpressure_.+"})'), time.time()
    server.stop_scraping()
    nothing = min(server.seconds("vector(0)", at) for _ in range(_EMPTY_QUERIES))
    found = costs(server, at, nothing, repeats)
    for line in report(found, series, nodes, server.get("status/buildinfo")["version"]):
        print(line)
    print(f"selecting each of the metrics read once takes {selecting(server, at, nothing):.3f} s")
    return 1 if sum(cost.a_minute for cost in found) > BUDGET_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
