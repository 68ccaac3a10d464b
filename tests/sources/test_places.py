"""Who gets a place in a full table: the best claims, then equal shares of namespaces and pods, whatever their names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model.readings import GpuOwner, Scrape, Snapshot
from kvpressure.sources.kubernetes.discovery import ContainerRow
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.places import Precedence, admitted

NAMES = st.sampled_from(["a", "aaa", "b", "prod", "zzz"])


@dataclass(frozen=True, order=True)
class Item:
    """Something of a pod; ``number`` tells those of one pod apart."""

    precedence: Precedence
    namespace: str
    pod: str
    number: int


CLAIMS = st.sampled_from(Precedence)
ITEMS = st.lists(st.builds(Item, CLAIMS, NAMES, NAMES, st.integers(0, 50)), max_size=30, unique=True)


def chosen(items: list[Item], room: int) -> tuple[list[Item], list[Item]]:
    return admitted(items, room, lambda item: item.precedence, lambda item: (item.namespace, item.pod))


def test_what_the_claim_of_a_pod_is() -> None:
    shared = SharedDiscovery()
    gpu = (ContainerRow("vllm", gpus={"nvidia.com/gpu": 1}),)
    shared.pods = (
        Pod("ns", "owns-and-ended", "1", "Failed"),
        Pod("ns", "owns", "2", "Pending"),
        Pod("ns", "asks", "3", "Running", rows=gpu),
        Pod("ns", "asks-in-vain", "4", "Failed", rows=gpu),
        Pod("ns", "serves", "5", "Running"),
        Pod("ns", "runs", "6", "Running"),
        Pod("ns", "waits", "7", "Pending", rows=gpu),
    )
    owners = [GpuOwner("GPU-0", "ns", name, "vllm") for name in ("owns-and-ended", "owns", "unlisted")]
    pages = (Scrape("t", 1.0, "ns", "serves"), Scrape("u", 1.0, "ns", "unlisted"), Scrape("v", 1.0, "ns", "static"))
    shared.observe(Snapshot(1.0, owners=tuple(owners), pages=pages), None)
    assert {name: claim.name for (_, name), claim in shared.precedences().items()} == {
        "owns-and-ended": "ENDED",
        "owns": "HAS_GPU",
        "unlisted": "HAS_GPU",
        "asks": "ASKS_GPU",
        "asks-in-vain": "ENDED",
        "serves": "SERVES",
        "static": "SERVES",
        "runs": "RUNS",
        "waits": "WAITS",
    }


@given(ITEMS, st.integers(0, 30))
def test_nothing_is_lost_the_room_is_kept_and_claims_and_shares_decide(items: list[Item], room: int) -> None:
    kept, left_out = chosen(items, room)
    assert len(kept) == min(room, len(items))
    assert max((item.precedence for item in kept), default=0) <= min((item.precedence for item in left_out), default=99)
    assert Counter(kept) + Counter(left_out) == Counter(items)
    for some in (kept, left_out):
        assert [item.precedence for item in some] == sorted(item.precedence for item in some)
    # nobody of equal claim has two more than somebody who was left out
    namespaces = Counter((item.precedence, item.namespace) for item in kept)
    pods = Counter((item.precedence, item.namespace, item.pod) for item in kept)
    for item in left_out:
        alike = {place: count for place, count in namespaces.items() if place[0] == item.precedence}
        assert max(alike.values(), default=0) <= namespaces[item.precedence, item.namespace] + 1
        siblings = {place: count for place, count in pods.items() if place[:2] == (item.precedence, item.namespace)}
        assert max(siblings.values(), default=0) <= pods[item.precedence, item.namespace, item.pod] + 1


@given(ITEMS, st.integers(0, 30), st.randoms())
def test_the_order_in_which_pods_come_decides_nothing(items: list[Item], room: int, draw: object) -> None:
    mixed = sorted(items)
    draw.shuffle(mixed)  # type: ignore[attr-defined]  # random.Random
    of_pods = sorted(mixed, key=lambda item: item.number)  # as given, within a pod
    assert chosen(of_pods, room) == chosen(sorted(sorted(items), key=lambda item: item.number), room)


@given(ITEMS, st.integers(1, 30), st.integers(0, 20))
def test_a_table_that_is_cut_while_it_fills_ends_as_if_it_were_cut_once(
    items: list[Item], room: int, slack: int
) -> None:
    table: list[Item] = []
    for item in items:
        table.append(item)
        if len(table) > room + slack:
            table, _ = chosen(table, room)
    assert chosen(table, room)[0] == chosen(items, room)[0]
