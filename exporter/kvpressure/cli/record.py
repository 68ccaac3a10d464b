"""``kvpressure record``: read what ``serve`` would read, and keep it to be judged later."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvpressure import __version__
from kvpressure.advice.wording import reason_text
from kvpressure.errors import InputError, refused_file, shown
from kvpressure.model.readings import Snapshot
from kvpressure.model.state import State
from kvpressure.recording.format import Header
from kvpressure.recording.recorder import (
    DEFAULT_KEEP,
    DEFAULT_MAX_BYTES,
    BackgroundRecorder,
    Recorder,
    RecordingFull,
)
from kvpressure.runtime.logging import configure
from kvpressure.runtime.monitor import Monitor, monitor_of
from kvpressure.runtime.signal_flag import SignalFlag
from kvpressure.settings import settings
from kvpressure.settings.kinds import COUNT, SECONDS, SIZE
from kvpressure.toolbox.option_values import of_kind

FATAL_STATUS: Final = 3
_SHOWN_ERRORS: Final = 3  # targets in one line
_FILE_LIKE: Final = (".json", ".gz", ".txt", ".log", ".zst", ".bz2", ".xz", ".zip", ".csv")


_EXAMPLES: Final = """\
examples:
  kvpressure record --out incident.jsonl.gz --for 600            # ten minutes of this node
  kvpressure record http://127.0.0.1:8000 --out box.jsonl
  kvpressure record --out /var/lib/kvpressure --keep 24          # rotated files, the newest 24

Judge it later with kvpressure replay or kvpressure diagnose.

Exit status: 0 recorded; 1 nothing could be read, or --max-size was reached before the end of --for; 2 the settings cannot be used; 3 recording stopped because of an error.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Output and duration, then the settings of ``serve``."""
    parser.usage, parser.epilog = "%(prog)s [URL ...] --out FILE|DIR [option ...] [setting ...]", _EXAMPLES
    parser.add_argument(
        "engine.target", nargs="*", action="extend", metavar="URL", help="servers to read, as with --engine.target"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE|DIR",
        help="a file (NAME.jsonl.gz or NAME.jsonl), or a directory of rotated files",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=of_kind(SECONDS),
        default=None,
        metavar="TIME",
        help=f"stop after this time: {SECONDS.allowed} (default: stop on SIGINT or SIGTERM)",
    )
    parser.add_argument(
        "--max-size",
        type=of_kind(SIZE),
        default=DEFAULT_MAX_BYTES,
        metavar="SIZE",
        help=f"largest size of one file (default {DEFAULT_MAX_BYTES // 2**20}MiB). If --out is a directory, the"
        " next file begins at this size; if --out is a file, recording ends",
    )
    parser.add_argument(
        "--keep",
        type=of_kind(COUNT),
        default=DEFAULT_KEEP,
        metavar="N",
        help=f"how many of the newest files a directory keeps (default {DEFAULT_KEEP}); all files together at most N"
        " times --max-size",
    )
    names = [name for name in settings.options() if not name.startswith(("web.", "record"))]
    settings.add_arguments(parser, only=names)


def run(options: argparse.Namespace) -> int:
    """Record. 0 = done, 1 = full before ``--for`` was over or nothing was read, 3 = the disk or a source failed."""
    seconds: float | None = options.seconds
    _check_name(options.out)
    chosen = replace(settings.from_args(options), keep_exposition=True)
    configure(chosen.log_level, chosen.log_format)
    header = Header(chosen.interval_seconds, chosen.node_name, f"kvpressure {__version__} record")
    try:
        recorder = Recorder(options.out, header, max_bytes=options.max_size, keep=options.keep)
    except OSError as error:
        give = "a new file in an existing directory that can be written, or a directory for rotated files"
        raise InputError(refused_file(f"--out: {options.out}", error, give)) from error
    background = BackgroundRecorder(recorder)
    monitor, progress = monitor_of(chosen), _ReadCount()
    for listener in (background, progress):
        monitor.add_listener(listener)
    print(f"recording to {options.out}", file=sys.stderr)
    _wait(monitor, background, seconds)
    monitor.stop()
    background.close()
    return _conclude(monitor, background, progress, seconds)


def _check_name(out: str) -> None:
    """Raise for a name that is no recording's: it would become a directory, which is hardly meant for
    ``incident.json``.
    """
    if not out or (out.endswith(_FILE_LIKE) and not out.endswith((".jsonl", ".jsonl.gz")) and not Path(out).is_dir()):
        raise InputError(
            f"--out: {shown(out)} is not allowed; allowed: a file NAME.jsonl or NAME.jsonl.gz, or a directory"
        )


class _ReadCount:
    """A listener that counts readings."""

    def __init__(self) -> None:
        self.ticks = self.scrapes = self.failed = 0
        self.empty = True  # no scrape and no GPU: the recording would be of nothing
        self.errors: dict[str, str] = {}  # why the last scrape of each target failed

    def __call__(self, snapshot: Snapshot, _state: State) -> None:
        self.ticks += 1
        kept = sum(page.error is None and page.exposition is not None for page in snapshot.pages)
        self.scrapes += kept
        self.failed += len(snapshot.pages) - kept
        self.empty = self.empty and not kept and not snapshot.gpus
        self.errors |= {page.target: reason_text(page.error) for page in snapshot.pages if page.error is not None}

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.ticks} ticks, {self.scrapes} scrapes{failed}"


def _wait(monitor: Monitor, background: BackgroundRecorder, seconds: float | None) -> None:
    """Wait for a signal, the end of the time, a full or failing disk, or a fatal source."""
    stopping = SignalFlag()
    stopping.follow((signal.SIGTERM, signal.SIGINT))
    end = None if seconds is None else time.monotonic() + seconds
    monitor.start()
    while not (stopping.is_set() or background.failed.is_set()):
        left = 0.2 if end is None else min(0.2, end - time.monotonic())
        if left <= 0 or monitor.wait(left):
            return


def _conclude(monitor: Monitor, background: BackgroundRecorder, progress: _ReadCount, seconds: float | None) -> int:
    """Report what was recorded, and why it ended early if it did."""
    recorder = background.recorder
    lost = background.dropped + recorder.dropped
    dropped = f", {lost} ticks not written" if lost else ""
    print(f"{recorder.path}: {progress}{dropped}", file=sys.stderr)
    if isinstance(background.error, RecordingFull):
        print(f"kvpressure record: {background.error}; give a larger --max-size to record more", file=sys.stderr)
        return 0 if seconds is None else 1
    if background.error is not None:
        return FATAL_STATUS  # the recorder has logged why
    if monitor.fatal is not None:
        print(
            f"kvpressure record: stopped because a source needs a new process to recover ({monitor.fatal});"
            " start kvpressure record again",
            file=sys.stderr,
        )
        return FATAL_STATUS
    if progress.empty:
        reasons = [f"{target}: {reason}" for target, reason in sorted(progress.errors.items())[:_SHOWN_ERRORS]]
        print(
            "kvpressure record: nothing was recorded: no GPU could be read, and no engine could be scraped"
            f" ({'; '.join(reasons) or 'no engine was found; name one with --engine.target'})",
            file=sys.stderr,
        )
        return 1
    return 0
