"""What hostile engines may cost the real process: a budget of memory, and nothing to the honest one."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.helpers.serve_process import LISTEN, QUIET, Process
from tests.helpers.waiting import until
from tests.helpers.web import serving_pages

pytestmark = pytest.mark.live

MORE_MIB = 16.0  # what 64 hostile targets may cost beyond 64 honest ones; measured 3
LIMIT_MIB = 144.0  # three quarters of the chart's limit
HONEST = gzip.decompress((Path(__file__).parents[1] / "fixtures/vllm/d_kv_pressure.prom.gz").read_bytes())
LARGEST = 4 * 1024 * 1024 - 1
SECONDS = 6.0
HISTOGRAMS = (
    *("time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds"),
    *("request_queue_time_seconds",),
)


def new_lines(version: int) -> bytes:
    """As much as may be sent, worth remembering, and never seen before."""
    lines = (f'x_bucket{{le="{n}",label="{version}-{n}-{"y" * 20}"}} {n}\n' for n in range(60_000))
    return HONEST + "".join(lines).encode()


def wide_characters(version: int) -> bytes:
    """Text that takes four bytes a character as soon as it is looked at."""
    lines = (f'x{{label="{version}-{n}-{chr(0x1F600) * 200}"}} {n}\n' for n in range(4_800))
    return HONEST + "".join(lines).encode()


def new_engines(version: int) -> bytes:
    """As many engines as a page may have, with as many buckets as a histogram may have, and other ones each time."""
    labels = [f'engine="{version}-{engine}",model_name="m{"z" * 100}"' for engine in range(64)]
    lines = [f"vllm:num_requests_running{{{label}}} 1\n" for label in labels]
    lines += [
        f'vllm:{name}_bucket{{{label},le="{bound}"}} {number}\n'
        for name in HISTOGRAMS
        for label in labels
        for number, bound in enumerate((*range(59), "+Inf"))
    ]
    return "".join(lines).encode()


def many_figures_of_the_plugin(version: int) -> bytes:
    """What only the plugin inside vLLM writes, for engines that are not there."""
    lines = (
        f'kvpressure:engine_steps_total{{engine="{version}-{n}",count="batch",size="{n}"}} 1\n' for n in range(50_000)
    )
    return HONEST + b"".join(line.encode() for line in lines)


def long_labels(version: int) -> bytes:
    """Series that are told apart by sixteen kilobytes of labels each."""
    more = ",".join(f'l{label}="{"y" * 1000}"' for label in range(15))
    return (
        HONEST
        + "".join(f'http_requests_total{{status="2xx",n="{version}-{n}",{more}}} 1\n' for n in range(250)).encode()
    )


def new_names(version: int) -> bytes:
    """Engines and models under other names on every page, a small page."""
    return "".join(
        f'vllm:{name}{{engine="{version}-{n}-{time.monotonic_ns()}",model_name="{"m" * 240}{n}"}} {version}\n'
        for n in range(64)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total")
    ).encode()


def absurd_values(version: int) -> bytes:
    """Every value of an honest page as large as text can make it."""
    return re.sub(
        rb"^([^#].*) \S+$", rb"\1 1.7e308" if version % 2 else rb"\1 " + b"9" * 300, HONEST, flags=re.MULTILINE
    )


def steps_of_every_size(version: int) -> bytes:
    """The plugin's counts of four thousand batch sizes, all of which rise with every page."""
    lines = (
        f'kvpressure:engine_steps_total{{engine="0",count="{count}",size="{n}"}} {1000 * version + 1}\n'
        for count in ("batch", "running")
        for n in range(1, 500)
    )
    return HONEST + b"\nkvpressure:frontends 1\n" + "".join(lines).encode()


KINDS = (
    *(new_lines, wide_characters, new_engines, many_figures_of_the_plugin, long_labels, new_names, absurd_values),
    steps_of_every_size,
)


@pytest.fixture
def hostile() -> Iterator[Callable[[Callable[[int], bytes]], str]]:
    """Starts a server whose page is another one every time; its address. Every path is a page."""
    with ExitStack() as servers:

        def start(page: Callable[[int], bytes]) -> str:
            bodies = [
                body if len(body) < LARGEST else body[: body.rindex(b"\n", 0, LARGEST) + 1]
                for body in map(page, range(3))
            ]
            turn = count()
            return servers.enter_context(
                serving_pages(lambda path: HONEST if path.startswith("/honest") else bodies[next(turn) % len(bodies)])
            )

        yield start


def largest_mib(targets: list[str], *more: str, shown: Collection[str] = ()) -> tuple[float, str]:
    """What the process took at most in a while with these targets, and its metrics once ``shown`` is in them."""

    def settled() -> str | None:
        text = process.scrape()
        read = text.count("kvpressure_target_scrape_seconds{") == len(targets)
        return text if read and all(one in text for one in shown) else None

    arguments = [flag for target in targets for flag in ("--engine.target", target)]
    process = Process(*QUIET, *LISTEN, "--engine.pace", "fixed", *more, *arguments)
    try:
        process.scrape()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(0.5)
            process.scrape()
        seen = until(settled)
        return process.memory_mib("VmHWM"), seen
    finally:
        process.child.kill()
        process.child.wait(10)


@pytest.mark.writer(
    "anyone who may start a pod on the node",
    "unlimited numbers of labels, engines or batch sizes",
    "a part of the memory that all targets share",
    "every stored object counts with its real size; each target has a fair share",
)
def test_sixty_four_hostile_targets_of_every_kind_cost_little_more_than_honest_ones(
    hostile: Callable[[Callable[[int], bytes]], str],
) -> None:
    """Three quarters of the chart's limit are the most that may be taken, whatever is read."""
    honest = hostile(lambda _version: HONEST)
    normal, seen = largest_mib([f"good/chat-{n}={honest}/{n}" for n in range(64)])
    assert seen.count("kvpressure_engine_up{") == 64
    bad = [f"bad/p{n}={hostile(kind)}/{n}" for n, kind in enumerate(KINDS * 8) if n < 63]
    worst, seen = largest_mib(
        [*bad, f"good/chat-0={honest}/honest"],
        shown=[f'kvpressure_page_cut{{reason="{reason}",target=' for reason in ("engines", "plugin")],
    )
    assert re.search(r'^kvpressure_engine_up\{.*pod="chat-0".*\} 1\.0$', seen, re.MULTILINE)
    print(f"honest {normal:.0f} MiB, hostile {worst:.0f} MiB")
    assert worst <= normal + MORE_MIB
    assert worst < LIMIT_MIB
