"""The direction of dependencies, read from every import statement in src."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paceline

SRC = Path(paceline.__file__).parent
BASE = {"errors", "params", "types", "config", "interfaces"}
PARTS = {"draft", "verify", "control", "cache", "models", "sampling"}
ALLOWED = {  # what each module or package may import, besides itself
    "errors": set(),
    "config": {"errors"},
    "params": {"errors"},
    "types": {"params"},
    "interfaces": {"types"},
    "sampling": BASE,
    "cache": BASE,
    "control": BASE,
    "verify": BASE | {"sampling"},
    "models": BASE | {"sampling", "cache", "_native"},
    "draft": BASE | {"cache", "sampling", "_native"},
    "testing": BASE | {"sampling"},
    "engine": BASE | PARTS,
    "drafters": BASE | {"draft", "models"},
    "machine": set(),
    "costs": BASE | {"control", "models", "machine"},
    "llm": BASE | PARTS | {"engine", "drafters", "costs"},
    "bench": BASE | PARTS | {"engine", "llm", "costs", "machine", "_native"},
    "serve": BASE | PARTS | {"engine", "llm"},
    "__main__": {"cli"},
    "cli": BASE | PARTS | {"engine", "llm", "bench", "serve"},
}
AT_USE = {
    "torch",
    "transformers",
    "huggingface_hub",
    "llguidance",
    "matplotlib",
}  # seconds to import: inside functions, but for models/torch_*


def modules() -> Iterator[Path]:
    return (path for path in sorted(SRC.rglob("*.py")) if path != SRC / "__init__.py")


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each imported module; `from paceline import draft` counts as paceline.draft."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "paceline":
                yield from ((node.lineno, f"paceline.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def owner(path: Path) -> str:
    """The module or package directly under paceline that a file belongs to."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def breaches(path: Path) -> Iterator[str]:
    here = owner(path)
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "paceline" and target and target != here and target not in ALLOWED[here]:
            yield f"{path.relative_to(SRC)}:{line}: {here} imports {name}"
        if top == "torch" and not (here == "models" and path.name.startswith("torch_")):
            yield f"{path.relative_to(SRC)}:{line}: only models/torch_* imports torch"
        if name.startswith("paceline.models.torch_") and not path.name.startswith(("torch_", "runners.")):
            yield f"{path.relative_to(SRC)}:{line}: only models/runners.py and models/torch_* import {name}"
    for line, name in imports(path, top_level_only=True):
        if name.partition(".")[0] in AT_USE and not path.name.startswith("torch_"):
            yield f"{path.relative_to(SRC)}:{line}: {name} is imported before it is used"


def test_imports_point_one_way():
    assert [breach for path in modules() for breach in breaches(path)] == []


def test_every_module_has_a_rule():
    assert {owner(path) for path in modules()} <= ALLOWED.keys()


def test_a_breach_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    path = tmp_path / "draft" / "ngram.py"
    path.parent.mkdir()
    path.write_text("import torch\n\n\ndef f():\n    from paceline.verify.coupled import Coupled\n")
    assert len(list(breaches(path))) == 3


def loaded_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_llm_waits_with_heavy_imports_until_a_model_is_loaded():
    assert not loaded_after("import paceline.llm, paceline.cli.main") & AT_USE
