"""One module opens files and one function makes paths of text from outside: ``kvpressure.files``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "files.py" or path.parent != PACKAGE)

OPENING = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "FileIO", "GzipFile"}
BY_NAME = {"load_cert_chain", "load_verify_locations", "create_default_context"}  # of libraries that open by name
OPENED_ELSEWHERE = {
    ("capacity/models.py", "FILE.read_text"): "a file of this package",
    ("engines/options.py", "path.read_text"): "a file of this package",
    ("publish/page/render.py", "(_FOLDER / name).read_text"): "a file of this package",
    ("settings/thresholds.py", "_CONSTANTS.read_text"): "a file of this package",
    ("settings/thresholds.py", "_FILE.read_text"): "a file of this package",
    ("bundle/render.py", "target.read_text"): "compared with what a command writes; is_file() was asked",
    ("bundle/render.py", "target.write_text"): "what a command writes into a directory that a person names",
    ("cli/__init__.py", "Path(os.devnull).open"): "/dev/null",
    ("cli/__init__.py", "os.open"): "/dev/null",
    ("recording/openmetrics.py", "os.fdopen"): "the descriptor of open_to_write",
    ("publish/web/webconfig.py", "context.load_cert_chain"): "files that _file has checked",
    ("publish/web/webconfig.py", "context.load_verify_locations"): "files that _file has checked",
    ("sources/gpu/nvidia/source.py", "self._session.open"): "no file: the driver's library",
}
"""Calls outside ``files`` that open something, by module and callee, each with the reason."""

JOINED_ELSEWHERE = {
    ("sources/host/procfs.py", "self._root / str(pid)"): "a number",
    ("sources/host/procfs.py", "self._root / str(pid) / name"): "a number, and words of the source code",
    ("sources/gpu/nvidia/source.py", "Path(getattr(settings, 'host_sys', '/sys'))"): "of an option",
    ("sources/host/processes.py", "root / str(pid)"): "a number",
    ("sources/host/processes.py", "self._root / name"): "of numbers, hexadecimal digits and words of the source code",
    ("sources/host/processes.py", "self._root / str(pid)"): "a number",
    ("sources/host/processes.py", "self._root / f'{pid}/fd'"): "a number",
    ("sources/host/processes.py", "self._root / f'{pid}/ns/net'"): "a number",
    ("sources/host/log_files.py", "self.directory / older[0]"): "listed there",
    ("sources/host/log_files.py", "self.directory / f'{current}.log'"): "a number",
    ("sources/host/log_files.py", "self.directory / f'{files.live[-2]}.log'"): "a number",
    ("sources/host/log_files.py", "self.directory / f'{following}.log'"): "a number",
    ("sources/host/log_files.py", "self.directory / f'{self._current}.log'"): "a number",
    ("sources/gpu/amd/sysfs.py", "Path(f'{drm}/{name}/device')"): "listed there",
    ("sources/gpu/amd/sysfs.py", "Path(f'{root}/module/amdgpu')"): "of an option",
    ("sources/gpu/amd/sysfs.py", "Path(device.path)"): "found in sysfs",
    ("sources/host/cgroup.py", "Path(entry.path)"): "listed there",
    ("sources/kubernetes/api.py", "Path(token_file)"): "of an option",
    ("sources/kubernetes/api.py", "Path(ca_file)"): "of an option",
}
"""Paths that sources make of variables without ``below``, by module and expression, each with the reason."""


def callee(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def opened(module: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Calls that open a file by any other way than ``files``."""
    local = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = callee(node)
        if isinstance(node.func, ast.Name) and (name in local or name != "open"):
            continue  # a function of the module's own that has such a name
        inside = {callee(one) for one in ast.walk(node) if isinstance(one, ast.Call)}
        given = {word.arg for word in node.keywords}
        if name == "create_default_context" and ("checked" in inside or "cafile" not in given):
            continue
        if name in OPENING | BY_NAME:
            yield module, ast.unparse(node.func)


def joined(module: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Paths made of anything but words of the source code."""
    names = {"root", "_root", "directory", "folder", "path", "drm", "sysfs", "device", "_file"}

    def is_path(node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return is_path(node.left)
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return name in names or (isinstance(node, ast.Call) and callee(node) == "Path")

    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and is_path(node.left):
            parts = [node.right]
        elif isinstance(node, ast.Call) and callee(node) in ("Path", "joinpath", "with_name", "join", "realpath"):
            if callee(node) == "join" and ast.unparse(node.func) != "os.path.join":
                continue
            parts = node.args
        else:
            continue
        if not all(isinstance(part, ast.Constant) or _is_name_of_ours(part) for part in parts):
            yield module, ast.unparse(node)


def _is_name_of_ours(node: ast.AST) -> bool:
    """A constant of a module."""
    return isinstance(node, ast.Name) and node.id.isupper()


def every(find: Callable[[str, ast.AST], Iterator[tuple[str, str]]], folder: str = "") -> set[tuple[str, str]]:
    modules = {str(path.relative_to(PACKAGE)): path for path in MODULES}
    read = {name: ast.parse(path.read_text()) for name, path in modules.items() if name.startswith(folder)}
    return {found for name, tree in read.items() for found in find(name, tree)}


@pytest.mark.slow
def test_files_are_opened_in_one_module() -> None:
    assert every(opened) == set(OPENED_ELSEWHERE)


def test_sources_make_paths_of_text_with_below() -> None:
    assert every(joined, "sources/") == set(JOINED_ELSEWHERE)
