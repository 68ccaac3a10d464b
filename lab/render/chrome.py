"""Chromium without a window: pictures and documents of pages."""

from __future__ import annotations

import base64
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.request import urlopen

BROWSER: Final = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
DARK: Final = "--blink-settings=preferredColorScheme=0"
ATTEMPTS: Final = 5
QUALITY: Final = 0.82  # of WebP: text stays sharp, a first screen takes about 70 kB
_SHRINK: Final = """<!doctype html><img id=picture src="data:image/png;base64,{png}"><script>
onload = () => {{
  const picture = document.getElementById('picture');
  const canvas = Object.assign(document.createElement('canvas'), {{width: picture.naturalWidth, height: picture.naturalHeight}});
  canvas.getContext('2d').drawImage(picture, 0, 0);
  document.body.textContent = canvas.toDataURL('image/webp', {quality});
}};</script>"""  # noqa: E501


def browse(url: str, *flags: str, seconds: float = 20.0) -> str:
    """Open ``url``, let ``seconds`` of the page's own time pass, do what ``flags`` say; returns what is printed."""
    with tempfile.TemporaryDirectory() as profile:
        command = [*BROWSER, f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * seconds:.0f}", *flags, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


def picture(url: str, out: Path, width: int, height: int, *flags: str, seconds: float = 20.0) -> None:
    """Picture of ``url``, which must not change meanwhile, in ``out``: a PNG or (by its suffix) a smaller WebP.

    It is taken until two in a row are alike: on a busy machine the browser may leave parts unpainted.
    """
    with tempfile.TemporaryDirectory() as folder:
        png, before = Path(folder) / "picture.png", b""
        for _ in range(ATTEMPTS):
            browse(url, f"--window-size={width},{height}", f"--screenshot={png}", *flags, seconds=seconds)
            if png.read_bytes() == before:
                break
            before = png.read_bytes()
        out.write_bytes(_webp(png) if out.suffix == ".webp" else png.read_bytes())


@contextmanager
def saved(url: str) -> Iterator[str]:
    """Address of a copy of the page at ``url`` as it is now, without its script, which would refresh it."""
    with tempfile.TemporaryDirectory() as folder, urlopen(url, timeout=10) as answer:
        copy = Path(folder) / "page.html"
        copy.write_text(re.sub("<script>.*?</script>", "", answer.read().decode(), flags=re.DOTALL), encoding="utf-8")
        yield copy.as_uri()


def _webp(png: Path) -> bytes:
    """The picture as WebP, by the browser's own encoder."""
    page = png.with_suffix(".html")
    page.write_text(_SHRINK.format(png=base64.b64encode(png.read_bytes()).decode(), quality=QUALITY), encoding="utf-8")
    found = re.search(r"data:image/webp;base64,([\w+/=]+)", browse(page.as_uri(), "--dump-dom"))
    if found is None:
        raise RuntimeError("the browser did not encode the picture")
    return base64.b64decode(found[1])
