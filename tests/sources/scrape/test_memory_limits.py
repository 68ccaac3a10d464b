"""What all pages together may take: equal parts, what others leave, and pool for large pages."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.engines.vllm.page import CONFIG_LABELS
from kvpressure.model.readings import EngineReading
from kvpressure.sources.base import SourceError
from kvpressure.sources.scrape.fetch import GROWING, MAX_BODY_BYTES, Fetcher
from kvpressure.sources.scrape.layout import LARGE_PAGES_BYTES, REMEMBERED_BYTES, FairShare, MemoryPool, ScrapeLimits
from kvpressure.sources.scrape.new_engines import NewEngines
from kvpressure.sources.scrape.scanner import Scanner
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers import vllm_pages
from tests.helpers.vllm_server import answering, response

pytestmark = pytest.mark.slow
SNOWMEN = "\N{SNOWMAN}" * 900


def test_users_with_a_worse_precedence_share_what_the_better_ones_leave() -> None:
    share = FairShare(10)
    for user, precedence in (("gpu", 1), ("a", 4), ("b", 4)):
        share.join(user, precedence)
        share.use(user, 6)
    assert [share.allowed(user) for user in ("gpu", "a", "b")] == [10, 2, 2]


def test_the_first_leaves_what_is_kept_for_each_of_the_others():
    """Else 64 targets take the total, which the first has, and 63 times the least: twice as much as is shared."""
    users = range(64)
    share = FairShare(1000, each=15, kept=15)
    for user in users:
        share.join(user)
    for user in users:
        share.use(user, share.allowed(user))
    assert sum(share._used.values()) <= 64 * 15 + (1000 - 64 * 15)
    alone = FairShare(1000, each=15, kept=15)
    alone.join("one")
    assert alone.allowed("one") == 1000


@given(
    total=st.integers(1, 1000),
    each=st.integers(1, 20),
    wanted=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    rounds=st.integers(1, 3),
)
def test_however_much_is_wanted_the_sum_stays_bounded_and_everybody_gets_a_part(total, each, wanted, rounds):
    share = FairShare(total, each)
    for user in range(len(wanted)):
        share.join(user)
    least = max(each, total // len(wanted))
    for _ in range(rounds):
        for user, amount in enumerate(wanted):
            allowed = share.allowed(user)
            assert allowed >= least
            share.use(user, min(amount, allowed))
    used = sum(share._used.values())
    assert used <= max(total, least * len(wanted)) + (total if rounds == 1 else 0)


def test_room_that_comes_free_is_taken_at_once():
    pool = MemoryPool(100)
    took = []

    def later():
        with pool.lease() as lease:
            began = time.monotonic()
            lease.grow(100, 10)
            took.append(time.monotonic() - began)

    with pool.lease() as first:
        first.grow(100, 0)
        thread = threading.Thread(target=later)
        thread.start()
        time.sleep(0.1)
    thread.join(5)
    assert 0.05 < took[0] < 5


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


BODY = b"x" * (63 * 65536)
LARGE = {
    "of known length": (response(BODY), len(BODY)),
    "chunked": (CHUNKED + 63 * (b"10000\r\n" + BODY[:65536] + b"\r\n") + b"0\r\n\r\n", int(GROWING * MAX_BODY_BYTES)),
}


@pytest.mark.parametrize(("answer", "claimed"), LARGE.values(), ids=LARGE)
def test_a_large_page_takes_no_more_than_it_claims_before_it_is_read(answer: bytes, claimed: int):
    pool = MemoryPool()
    with answering(answer) as server, pool.lease() as lease:
        fetcher = Fetcher(parse_target(server.url), 20)
        (page, _), taken = peak_of(lambda: (fetcher.fetch(lease), fetcher.close()))
    assert page == BODY
    assert lease.taken == claimed
    assert taken < LARGE_PAGES_BYTES + 512 * 1024


def peak_of(action: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the most memory that it takes, in bytes."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.fault(
    "engines",
    "a scrape is too large, or too many are large",
    "`engine_up` 0 for it, others up",
    '`target_errors_total{reason="too_large"}`, `"crowded"`',
    "when it shrinks",
)
def test_a_large_page_without_room_is_crowded_and_the_next_one_is_read():
    pool = MemoryPool(2**20 - 1)
    with answering(response(b"x" * 2**20)) as server:
        fetcher = Fetcher(parse_target(server.url), 0.3)
        with pool.lease() as lease, pytest.raises(SourceError) as caught:
            fetcher.fetch(lease)
        assert caught.value.reason == "crowded"
        assert len(fetcher.fetch()) == 2**20, "without a lease it is read in any case"
        fetcher.close()


def traced(build: Callable[[], object]) -> tuple[object, int]:
    """What ``build`` returns, and the bytes that it holds."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        built = build()
        return built, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def long_labels(version: int, series: int = 250) -> str:
    """Series of one total, each told apart by sixteen kilobytes of labels."""
    more = ",".join(f'l{label}="{"y" * 1000}"' for label in range(15))
    return "".join(f'http_requests_total{{status="2xx",n="{version}-{n}",{more}}} 1\n' for n in range(series))


def many_engines(version: int) -> str:
    names = (f'engine="{version}-{n}-{"e" * 200}",model_name="{"m" * 250}"' for n in range(64))
    return "".join(f"vllm:num_requests_running{{{name}}} 1\nvllm:kv_cache_usage_perc{{{name}}} 0.5\n" for name in names)


def many_configs(version: int) -> str:
    more = ",".join(f'{label}="{"c" * 900}"' for label in sorted(CONFIG_LABELS)[:15])
    return "".join(f'vllm:cache_config_info{{engine="{version}-{n}",{more}}} 1\n' for n in range(100))


def wide_lines(version: int) -> str:
    lines = (f'x{version}_{n}{{a="{SNOWMEN}"}} 1\n' for n in range(4_000))
    return f'vllm:num_requests_running{{engine="{version}",model_name="m"}} 1\n' + "".join(lines)


def many_series(version: int) -> str:
    labels = (f'engine="0",model_name="m",pid="{version}-{n}"' for n in range(5_000))
    return "".join(f"vllm:kv_cache_usage_perc{{{label}}} 0.5\n" for label in labels)


def many_families(version: int) -> str:
    line = 'vllm:num_requests_running{engine="0",model_name="m"} 1\n'
    return line + f"# TYPE {version}x\n" * 12_900  # 128 KiB


@pytest.mark.parametrize("page", [long_labels, wide_lines, many_series, many_engines, many_configs, many_families])
def test_what_a_scanner_keeps_is_charged_as_it_is(page: Callable[[int], str]) -> None:
    """250 labels of 16 KB on each page were charged 320 bytes each: 64 such targets took 287 MiB."""
    bounds = ScrapeLimits()
    scanner = Scanner(bounds)
    pages = [page(version) for version in range(4)]
    _, held = traced(lambda: [scanner.scan(text) and None for text in pages])
    assert held <= 1.1 * scanner._bytes + 256 * 1024
    assert held <= 2 * REMEMBERED_BYTES


@pytest.mark.attack("new 16 KB labels on every scrape of 64 targets", "charged by their real size, then left out")
def test_sixty_four_scanners_of_long_labels_stay_within_what_all_may_remember() -> None:
    bounds = ScrapeLimits()
    scanners = [Scanner(bounds) for _ in range(64)]
    for text in (long_labels(version, 24) for version in range(2)):  # three times what they may remember
        for scanner in scanners:
            scanner.scan(text)
    assert sum(scanner._bytes for scanner in scanners) <= 1.25 * REMEMBERED_BYTES


def test_targets_with_the_same_lines_share_what_these_are_until_one_gets_another() -> None:
    bounds, text = ScrapeLimits(), vllm_pages.text_of("d_kv_pressure")
    first, second = Scanner(bounds), Scanner(bounds)
    one, alone = traced(lambda: first.scan(text))
    other, shared = traced(lambda: second.scan(text))
    assert other == one
    assert shared < alone / 4
    more = text + 'vllm:num_preemptions_total{engine="1",model_name="m"} 7\n'
    assert second.scan(more) == Scanner().scan(more)
    assert first.scan(text) == one


def engines(*names: str) -> tuple[EngineReading, ...]:
    return tuple(EngineReading("m", name) for name in names)


class TestNewEngines:
    @pytest.mark.writer(
        "anyone who may start a pod on the node",
        "new engine names on every scrape",
        "64 series sets at once, then one a minute",
        "a budget of new names for each target",
    )
    def test_names_that_are_new_on_every_page_come_one_a_minute_after_the_first(self) -> None:
        new, kept, refused = NewEngines(), 0, 0
        for second in range(600):
            believed, more = new.admit(engines(*(f"{second}-{n}" for n in range(64))), float(second))
            kept, refused = kept + len(believed), refused + more
        assert kept <= 64 + 10
        assert kept + refused == 600 * 64

    def test_known_ones_stay_for_ever_beside_refused_ones(self) -> None:
        new = NewEngines()
        new.admit(engines("good"), 0.0)
        for second in range(200):
            believed, _ = new.admit(engines("good", *(f"{second}-{n}" for n in range(63))), float(second))
            assert believed[0].engine == "good"

    def test_a_node_of_64_engines_is_whole_at_once_and_a_restart_under_another_name_is_taken(self) -> None:
        new = NewEngines()
        assert new.admit(engines(*map(str, range(64))), 0.0)[1] == 0
        assert new.admit(engines(*map(str, range(1, 64)), "renamed"), 61.0)[1] == 0

    def test_what_is_remembered_is_bounded(self) -> None:
        new = NewEngines()
        for hour in range(1000):
            new.admit(engines(str(hour)), 3600.0 * hour)
        assert len(new._known) <= 2 * 64
