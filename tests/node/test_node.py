"""What docs/deploy.md promises, on a node that runs it. One story: the tests depend on the order they stand in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helm_python import Chart

from tests.helpers.waiting import until
from tests.node.cluster import CHART, ENGINES, EXPORTERS, PATIENCE, Node

pytestmark = [pytest.mark.live, pytest.mark.slow]

CHAT = {"namespace": ENGINES, "container": "vllm"}


@pytest.fixture(scope="module")
def installed(node: Node) -> Node:
    """The chart, installed, and a server that was there before it."""
    node.serve("chat", "--max-num-seqs", "64")
    node.install()
    return node


def chat(node: Node) -> str:
    """The name of the server's pod."""
    (pod,) = [
        one
        for one in node.pods(ENGINES, "app=chat")
        if "deletionTimestamp" not in one["metadata"] and one["status"]["phase"] == "Running"
    ]
    name: str = pod["metadata"]["name"]
    return name


def in_exporter(node: Node, program: str) -> str:
    """What a Python program prints in the exporter's container."""
    return node.run("exec", "-n", EXPORTERS, node.exporter()["metadata"]["name"], "--", "python", "-c", program)


# --- installed ------------------------------------------------------------------------------------------------------


def test_the_daemonset_is_ready_by_its_own_probes(installed: Node) -> None:
    status = installed.get("ds", "kvpressure-nvidia", EXPORTERS)["status"]
    assert (status["desiredNumberScheduled"], status["numberReady"]) == (1, 1)
    (container,) = installed.exporter()["status"]["containerStatuses"]
    assert container["restartCount"] == 0


def test_helm_test_finds_the_exporter(installed: Node) -> None:
    """`helm test kvpressure -n kvpressure --logs`."""
    with installed.helm() as helm:
        result = helm.test("kvpressure", timeout=int(PATIENCE), logs=True)
    assert "1 of 1 exporters answer" in result["logs"]


def test_the_process_has_no_rights_that_the_chart_denies(installed: Node) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in in_exporter(installed, "print(open('/proc/1/status').read())").splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"  # a filter: the runtime's default
    attempt = "try:\n open('/written', 'w')\nexcept OSError as error:\n print(error.errno)"
    assert in_exporter(installed, attempt).strip() == "30"  # EROFS


def test_what_is_mounted_of_the_node_is_read_only(installed: Node) -> None:
    """Each folder of the node that the pod mounts, as the kernel sees it."""
    spec = installed.exporter()["spec"]
    of_node = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
    (container,) = spec["containers"]
    folders = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in of_node}
    assert "/var/log/pods" in folders
    mounts = in_exporter(installed, "print(open('/proc/self/mountinfo').read().strip())").splitlines()
    flags = {line.split()[4]: line.split()[5].split(",") for line in mounts}
    assert {folder for folder in folders if "ro" not in flags[folder]} == set()


def test_every_source_reads_what_this_node_has(installed: Node) -> None:
    """All but the cgroups: this node has version 1 of them, the exporter reads version 2."""
    installed.seen("kvpressure_engine_up", lambda up: up == 1)
    until(lambda: failing(installed) <= {"cgroup"}, PATIENCE)
    installed.seen("kvpressure_source_errors_total", source="cgroup", reason="not_cgroup_v2")


def failing(node: Node) -> set[str]:
    return {own["source"] for own, up in node.samples("kvpressure_source_up") if up != 1}


def test_gpu_pod_and_engine_are_joined(installed: Node) -> None:
    """By the kubelet's pod-resources socket: the device plugin gave the container its GPU."""
    name = chat(installed)
    own = installed.seen("kvpressure_engine_gpu_info", pod=name, namespace=ENGINES)
    assert own["uuid"].startswith("GPU-")
    assert own["model_name"] == "meta-llama/Llama-2-13b-chat-hf"
    assert len(installed.samples("kvpressure_gpu_info")) == 3
    installed.seen("kvpressure_kv_cache_used_ratio", pod=name)


def test_the_command_line_and_the_log_are_read(installed: Node) -> None:
    """Limits from the pod's arguments; from /var/log/pods what only vLLM's log says."""
    name = chat(installed)
    installed.seen("kvpressure_limit", lambda most: most == 64, pod=name, limit="max_num_seqs")
    installed.seen("kvpressure_log_events_total", pod=name, event="weights_bytes")
    installed.seen("kvpressure_memory_component_bytes", pod=name, component="weights")


# --- the tools ------------------------------------------------------------------------------------------------------


def test_diagnose_reads_the_cluster(installed: Node) -> None:
    status, out, problem = installed.tool("diagnose", "-n", ENGINES, "-l", "app=chat")
    assert status in (0, 1), out + problem
    assert chat(installed) in out
    assert "Traceback" not in problem


def test_audit_reads_a_workload(installed: Node, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(installed.run("get", "deploy", "-n", ENGINES, "-o", "yaml"))
    status, out, problem = installed.tool("audit", str(tmp_path / "all.yaml"), "--gpu", "H100:80", "--context", "3000")
    assert status in (0, 1), out + problem
    assert "chat" in out


# --- what happens on a node -----------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_for_memory_says_so(installed: Node) -> None:
    name = chat(installed)
    installed.run("exec", "-n", ENGINES, name, "--", "touch", "/tmp/fill")
    found = installed.seen("kvpressure_container_last_termination_info", pod=name)
    assert found["reason"] == "OOMKilled"
    installed.seen("kvpressure_container_restarts_total", lambda restarts: restarts >= 1, pod=name)
    installed.seen("kvpressure_engine_up", lambda up: up == 1, pod=name)


def test_a_deleted_pod_leaves_and_its_successor_has_the_gpu(installed: Node) -> None:
    before = chat(installed)
    installed.run("delete", "pod", before, "-n", ENGINES)
    installed.gone("kvpressure_engine_up", pod=before)
    installed.run("rollout", "status", "deploy/chat", "-n", ENGINES, f"--timeout={PATIENCE:.0f}s")
    installed.seen("kvpressure_engine_gpu_info", pod=chat(installed))


def test_a_kubelet_that_starts_anew_takes_nothing_away(installed: Node) -> None:
    """The pod-resources socket is another one then; the exporter's mount of its folder shows it."""
    name = chat(installed)
    installed.stop("kubelet")
    installed.seen("kvpressure_source_up", lambda up: up == 0, source="podresources")
    installed.start_kubelet()
    installed.seen("kvpressure_source_up", lambda up: up == 1, source="podresources")
    installed.seen("kvpressure_engine_gpu_info", pod=name)
    (container,) = installed.exporter()["status"]["containerStatuses"]
    assert container["restartCount"] == 0


def test_an_exporter_that_ends_comes_back(installed: Node) -> None:
    name = chat(installed)
    in_exporter(installed, "import os; os.kill(1, 15)")
    until(lambda: installed.exporter()["status"]["containerStatuses"][0]["restartCount"] == 1, PATIENCE)
    until(lambda: installed.exporter()["status"]["containerStatuses"][0]["ready"], PATIENCE)
    installed.seen("kvpressure_engine_up", lambda up: up == 1, pod=name)


def test_a_server_that_cannot_start_is_no_engine_that_is_down(installed: Node) -> None:
    """CrashLoopBackOff: restarts and the exit code are known from the pod's status."""
    broken = json.loads(installed.run("get", "deploy", "chat", "-n", ENGINES, "-o", "json"))
    broken["metadata"] = {"name": "broken", "namespace": ENGINES}
    broken["spec"]["selector"] = {"matchLabels": {"app": "broken"}}
    broken["spec"]["template"]["metadata"] = {"labels": {"app": "broken"}}
    broken["spec"]["template"]["spec"]["containers"][0]["args"] = ["a/model", "--max-num-seqs", "many"]
    broken.pop("status")
    installed.run("apply", "-f", "-", text=json.dumps(broken))
    until(lambda: len(installed.pods(ENGINES, "app=broken")) == 1, PATIENCE)
    name = installed.pods(ENGINES, "app=broken")[0]["metadata"]["name"]
    found = installed.seen("kvpressure_container_last_termination_info", pod=name)
    assert (found["reason"], found["exit_code"]) == ("Error", "2")
    installed.seen("kvpressure_container_restarts_total", lambda restarts: restarts >= 2, pod=name)
    status, out, problem = installed.tool("diagnose", "-n", ENGINES, "-l", "app=broken")
    assert "Traceback" not in problem
    assert name in out + problem, (status, out, problem)
    installed.run("delete", "deploy", "broken", "-n", ENGINES)
    installed.gone("kvpressure_container_last_termination_info", pod=name)


# --- another release ------------------------------------------------------------------------------------------------


def test_an_upgrade_restarts_the_pods_and_a_rollback_brings_the_old_settings(installed: Node) -> None:
    digest = "kvpressure.io/config-digest"
    first = installed.exporter()["metadata"]["annotations"][digest]
    with Chart.load(CHART) as chart, installed.helm() as helm:
        changed = installed.values(config={"log.level": "debug"})
        helm.upgrade(chart, "kvpressure", changed, wait="watcher", timeout=int(PATIENCE))
        second = installed.exporter()["metadata"]["annotations"][digest]
        helm.rollback("kvpressure", wait="watcher", timeout=int(PATIENCE))
        until(lambda: installed.exporter()["metadata"]["annotations"][digest] != second, PATIENCE)
        third = installed.exporter()["metadata"]["annotations"][digest]
    assert first == third != second
    installed.seen("kvpressure_engine_up", lambda up: up == 1, pod=chat(installed))


def test_a_drained_node_keeps_its_exporter(installed: Node) -> None:
    name = chat(installed)
    node = "gpu-node-0"
    installed.run("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    installed.gone("kvpressure_engine_up", pod=name)
    assert installed.get("ds", "kvpressure-nvidia", EXPORTERS)["status"]["numberReady"] == 1
    installed.run("uncordon", node)
    installed.run("rollout", "status", "deploy/chat", "-n", ENGINES, f"--timeout={PATIENCE:.0f}s")
    installed.seen("kvpressure_engine_up", lambda up: up == 1, pod=chat(installed))


def test_uninstall_leaves_nothing(installed: Node) -> None:
    with installed.helm() as helm:
        helm.uninstall("kvpressure", wait="watcher", timeout=int(PATIENCE))
    left = installed.run(
        "get", "ds,svc,cm,sa,clusterrole,clusterrolebinding,resourcequota,networkpolicy", "-n", EXPORTERS, "-o", "name"
    )
    assert [line for line in left.split() if "kvpressure" in line] == []
