"""README.md and the pages beside it: examples run, links lead somewhere, tables and names are those of the code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 6
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert "missing screws were sent" in capsys.readouterr().out
    assert scope["answer"].metrics.num_accepted_tokens > 0


def test_examples_of_structured_output_run(capsys):
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    scope: dict = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(example, "structured-output.md", "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[0]).keys() == {"title", "year"}
    assert printed[1] in ("positive", "negative")


DOCS = [f"docs/{name}.md" for name in ("design-notes", "drafters", "glossary", "native", "noise", "structured-output")]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *DOCS])
def test_links(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    for target in targets:
        assert ((ROOT / page).parent / target).exists(), target


def test_functions_that_a_token_passes_are_where_they_are_said_to_be():
    links = re.findall(r"\[`(\w+)\.(\w+)`\]\(([^)]+)\)", README)
    assert len(links) >= 6
    for cls, function, path in links:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"class {cls}" in source
        assert f"def {function}(" in source


def test_native_page_names_every_file_and_what_is_in_it():
    docs = ROOT / "docs"
    links = re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", (docs / "native.md").read_text(encoding="utf-8"))
    for name, target in links:
        path = docs / target
        if path.is_file() and not path.name.startswith(name):
            source = path.read_text(encoding="utf-8")
            assert all(re.search(rf"\b{word}\b", source) for word in re.split(r"::|\.", name)), name
    assert {path.stem for path in (ROOT / "native").iterdir()} <= {Path(target).stem for _, target in links}


def test_tree_names_what_is_there():
    tree = README.partition("## Where things are")[2]
    for name in re.findall(r"^  ([\w.]+?)(?:/|\s)", tree, re.MULTILINE):
        assert (ROOT / "src" / "paceline" / name).exists(), name
    packages = {path.name for path in (ROOT / "src" / "paceline").iterdir() if (path / "__init__.py").exists()}
    assert all(f"{name}/" in tree for name in packages)


def test_tables_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import performance_page
    import results_file

    table = performance_page.readme_table.render(results_file.read("smollm2-135m"), by_category=False)
    assert results_file.paste(README, table, name="benchmark") == README
    page = (ROOT / performance_page.PAGE).read_text(encoding="utf-8")
    assert page == performance_page.render(), "run benchmarks/performance_page.py"
    for name in ("performance_page", "readme_table", "results_file", "quality"):
        sys.modules.pop(name)
