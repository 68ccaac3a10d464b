"""Names become one component below their root or none, and only files that end are opened, without waiting."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpressure import files

NAMES = st.text(max_size=300) | st.text(st.sampled_from("./\0é\ud800a"), max_size=300)


@given(NAMES)
@example("..")
@example("a" * 255)
@example("é" * 128)
def test_a_component_is_a_name_of_its_own_in_its_directory(name: str) -> None:
    place = files.below(Path(f"/proc/{os.getpid()}"), name)
    assert (place is None) is (files.component(name) is None)
    if place is None:
        return
    assert (place.name, str(place.parent)) == (name, f"/proc/{os.getpid()}")
    assert os.path.normpath(place) == str(place)
    with contextlib.suppress(FileNotFoundError):  # the system takes the name: it is neither too long nor two
        place.stat()


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "/", "a\0", "a" * 256, "é" * 128, "\ud800"])
def test_what_is_no_component(name: str) -> None:
    assert files.component(name) is None
    assert files.below(Path("/root"), "fine", name) is None


PARTS = (
    "file",
    "packed",
    "directory",
    "pipe",
    "device",
    "socket",
    "inside",  # a link to a file below the root
    "outside",  # a link to one beside it
    "up",  # a link to the directory above
    "loop",
    "broken",
    "..",
    ".",
    "",
    "a" * 300,
    "\0",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root with everything that a name can be, in it and one directory deeper; a secret beside it."""
    above = tmp_path_factory.mktemp("tree")
    root = above / "root"
    (above / "secret").write_bytes(b"secret")
    with contextlib.ExitStack() as stack:
        for directory in (root, root / "directory"):
            directory.mkdir()
            (directory / "file").write_bytes(b"content")
            (directory / "packed").write_bytes(gzip.compress(b"content"))
            os.mkfifo(directory / "pipe")
            (directory / "device").symlink_to("/dev/zero")
            (directory / "inside").symlink_to(root / "file")
            (directory / "outside").symlink_to(above / "secret")
            (directory / "up").symlink_to(above)
            (directory / "loop").symlink_to("loop")
            (directory / "broken").symlink_to("nothing")
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(os.path.relpath(directory / "socket"))
        yield root


@given(st.lists(st.sampled_from(PARTS), max_size=4))
def test_only_regular_files_are_opened_and_below_a_root_only_its_own(tree: Path, parts: list[str]) -> None:
    """No draw waits; those with a root open what is there under that name and not what a link points at."""
    path = Path(os.path.join(tree, *(part or "." for part in parts)))  # noqa: PTH118 - keeps dots
    with contextlib.suppress(OSError):
        data = files.read_file(path, 100)
        assert path.is_file()
        assert data == path.read_bytes()
    with contextlib.suppress(OSError):
        data = files.read_file(path, 100, root=tree)
        assert data == path.read_bytes()
        assert Path(os.path.realpath(path)) == path
        assert path.is_relative_to(tree)
    with contextlib.suppress(OSError):
        os.close(files.open_to_write(path))
        assert stat.S_ISREG(path.lstat().st_mode)


@pytest.mark.attack("a pipe, device, socket, link or directory in place of a file of the exporter", "refused, at once")
@pytest.mark.parametrize("name", ["directory", "pipe", "device", "socket", "loop", "broken"])
def test_what_is_no_file_is_refused_at_once(tree: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"\w"):
        files.open_file(tree / name)
    with pytest.raises(OSError, match=r"\w"), files.open_packed(tree / name):
        pass
    with pytest.raises(OSError, match=r"\w"):
        files.checked(tree / name)
    with pytest.raises(OSError, match=r"\w"):
        files.open_to_write(tree / name)


def test_files_are_read_and_written(tree: Path, tmp_path: Path) -> None:
    assert files.read_file(tree / "file", 4) == b"cont"
    assert files.read_file(tree / "directory" / "file", 100, root=tree) == b"content"
    assert files.read_file(tree / "inside", 100) == b"content"
    assert files.checked(tree / "inside") == str(tree / "inside")
    for name in ("file", "packed"):
        with files.open_packed(tree / name) as file:
            assert file.read() == b"content"
    made = tmp_path / "made"
    made.write_bytes(b"before")
    os.close(files.open_to_write(made))
    assert made.read_bytes() == b"before"


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_that_a_person_names_is_read_to_its_end(tmp_path: Path, packed: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    content = os.urandom(200_000)
    data = gzip.compress(content) if packed else content
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,), daemon=True)
    writer.start()
    with files.open_packed(tmp_path / "pipe", pipe=True) as file:
        assert file.read() == content
    writer.join()
    for name in ("/dev/zero", "/dev/null", str(tmp_path)):
        with pytest.raises(OSError, match=r"\w"):
            files.open_file(name, pipe=True)


def test_a_file_that_waits_for_more_data_is_refused() -> None:
    """As ``/proc/kmsg``, which says that it is a regular file."""
    reads, writes = os.pipe2(os.O_NONBLOCK)
    os.write(writes, b"one message")
    with files._Regular(reads, "rb") as file:
        assert file.read(100) == b"one message"
        with pytest.raises(BlockingIOError, match="not a regular file"):
            file.readinto(bytearray(1))
    os.close(writes)
