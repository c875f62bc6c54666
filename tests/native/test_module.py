"""The extension is this package's own, and its stub names what it holds."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline
from paceline import _native


def test_extension_was_built_from_this_version():
    assert _native.version() == paceline.__version__


def test_stub_names_what_the_extension_holds():
    stub = ast.parse((Path(paceline.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert described == {name for name in dir(_native) if not name.startswith("_")}
