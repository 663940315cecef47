"""House rules that a reader relies on: notebooks, what importing does, matching pins, skips that fail in CI."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

from logra_core.lab.nbparams import ParameterError, notebook_parameters

ROOT = Path(__file__).resolve().parents[1]
TOP = {
    "notebooks",
    "logra_core",
    "data",
    "figures",
    "tests",
    "environment.yml",
    "README.md",
    "pyproject.toml",
    "Makefile",
    ".ci",
    ".gitignore",
    "LICENSE",
}
MAX_CELLS, MAX_CELL_LINES, MAX_DEF_LINES, MAX_NOTEBOOK_BYTES = 30, 25, 10, 600_000


def tracked(*patterns: str) -> list[Path]:
    """Files that are, or would be, committed; without git (a source archive) what matches on disk."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *patterns], capture_output=True, text=True
    )
    if listed.returncode:
        return sorted(p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file())
    return sorted(p for line in set(listed.stdout.splitlines()) if (p := ROOT / line).is_file())


def faults(path: Path) -> list[str]:
    """What a committed notebook breaks of the house rules."""
    found, nb = [], nbformat.read(path, as_version=4)
    if path.stat().st_size > MAX_NOTEBOOK_BYTES:
        found.append(f"{path.stat().st_size} bytes, allowed are {MAX_NOTEBOOK_BYTES}")
    if len(nb.cells) > MAX_CELLS:
        found.append(f"{len(nb.cells)} cells, allowed are {MAX_CELLS}")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append(f"kernel name {nb.metadata.get('kernelspec', {}).get('name')!r}, allowed is 'python3'")
    if "papermill" in nb.metadata:
        found.append("papermill's metadata: write it with `python -m logra_core.lab.nbrun --in-place`")
    try:
        notebook_parameters(path)
    except ParameterError as error:
        found.append(str(error))
    for number, cell in enumerate(nb.cells):
        if cell.cell_type == "code":
            found += [f"cell {number}: {text}" for text in cell_faults(cell)]
    return found


def cell_faults(cell) -> list[str]:
    found, lines = [], cell.source.splitlines()
    if cell.source.strip() and cell.execution_count is None:
        found.append("not executed, so its output would not be checked")
    if len(lines) > MAX_CELL_LINES:
        found.append(f"{len(lines)} lines, allowed are {MAX_CELL_LINES}")
    if any(o.output_type == "error" for o in cell.outputs):
        found.append("an error output")
    marks = [
        m for m in ("NBVAL_SKIP", "NBVAL_IGNORE_OUTPUT", "NBVAL_RAISES_EXCEPTION", "PYTEST_VALIDATE_IGNORE_OUTPUT") if m in cell.source
    ]
    marks += [t for t in cell.metadata.get("tags", []) if t.startswith("nbval-") or t in ("injected-parameters", "raises-exception")]
    if marks:
        found.append(f"{', '.join(marks)}: every cell is executed and compared")
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        return [*found, "not plain Python"]
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and (size := node.end_lineno - node.lineno + 1) > MAX_DEF_LINES
        ):
            found.append(f"definition {node.name} has {size} lines, allowed are {MAX_DEF_LINES}; it belongs in logra_core")
    text = str(cell.outputs)
    found += [
        f"its output names a folder of one machine: {m}" for m in {str(ROOT), *re.findall(r"/(?:home|root|Users)/\w+", text)} if m in text
    ]
    return found


def test_committed_notebooks_keep_the_rules() -> None:
    notebooks = tracked("notebooks/*.ipynb")
    assert notebooks, "no notebook in notebooks/"
    found = {p.name: faults(p) for p in notebooks}
    found |= {p.name: [*found[p.name], "name is not NN_words.ipynb"] for p in notebooks if not re.fullmatch(r"\d\d_\w+\.ipynb", p.name)}
    assert not {name: texts for name, texts in found.items() if texts}


def notebook(path: Path, **change) -> Path:
    """A notebook that keeps every rule, but for `change`."""
    cell = nbformat.v4.new_code_cell("n = 1", execution_count=1, metadata={"tags": ["parameters"]})
    more = nbformat.v4.new_code_cell(
        change.get("source", "print(n)"), execution_count=change.get("count", 2), outputs=change.get("outputs", [])
    )
    more.metadata["tags"] = change.get("tags", [])
    nb = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": change.get("kernel", "python3"), "display_name": "x", "language": "python"}}
    )
    nb.metadata |= change.get("metadata", {})
    nb.cells = [cell, more] + [nbformat.v4.new_markdown_cell(change.get("text", "x"))] * change.get("cells", 1)
    if change.get("untagged"):
        del cell.metadata["tags"]
    nbformat.write(nb, path)
    return path


@pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId")
@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"cells": 29}, "31 cells"),
        ({"text": "x" * 600_000}, "bytes, allowed"),
        ({"kernel": "mine"}, "kernel name 'mine'"),
        ({"untagged": True}, "0 code cells are tagged"),
        ({"tags": ["parameters"]}, "2 code cells are tagged"),
        ({"count": None}, "not executed"),
        ({"source": "x = 1\n" * 26}, "26 lines"),
        ({"source": "def f():\n" + "    x = 1\n" * 10}, "definition f has 11"),
        ({"source": "# NBVAL_SKIP"}, "NBVAL_SKIP"),
        ({"tags": ["nbval-ignore-output"]}, "nbval-ignore-output"),
        ({"outputs": [nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])]}, "an error output"),
        ({"metadata": {"papermill": {}}}, "papermill's metadata"),
        ({"outputs": [nbformat.v4.new_output("stream", text=f"saved {ROOT}/x")]}, "folder of one machine"),
        ({"source": "!ls"}, "not plain Python"),
    ],
)
def test_each_rule_finds_its_breach(tmp_path: Path, change: dict, needle: str) -> None:
    assert faults(notebook(tmp_path / "good.ipynb")) == []
    found = faults(notebook(tmp_path / "bad.ipynb", **change))
    assert len(found) == 1 and needle in found[0], found


def test_modules_say_what_belongs_in_them() -> None:
    found = []
    for path in tracked("logra_core/*.py"):
        if not ast.get_docstring(tree := ast.parse(path.read_text())) or tree.body[0].lineno > 10:
            found.append(f"{path.relative_to(ROOT)}: its first ten lines do not say what belongs in it")
    assert not found


def test_nothing_else_lies_at_the_top() -> None:
    tops = {p.relative_to(ROOT).parts[0] for p in tracked(".")}
    assert tops <= TOP, f"not expected at the top: {sorted(tops - TOP)}"


def test_importing_the_package_starts_nothing() -> None:
    code = "import logra_core, sys, threading\nassert not {'vllm', 'trl', 'matplotlib'} & set(sys.modules)"
    code += "\nassert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def pins(lines: list[str]) -> dict[str, str]:
    return {re.split(r"[=<>! \[;]", line, maxsplit=1)[0].lower().replace("_", "-"): line for line in lines}


def test_environment_yml_has_the_pins_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = pins(sum((extras[e] for e in ("notebooks", "tasks", "compare", "test", "vllm")), project["dependencies"]))
    listed = next(d["pip"] for d in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"] if isinstance(d, dict))
    assert pins([line for line in listed if not line.startswith("-e")]) == wanted
    assert {"jupyterlab", "torch", "transformers", "vllm", "matplotlib", "seaborn", "datasets", "nbval", "papermill"} <= set(wanted)


SKIPS = """import pytest
def test_a(): pytest.skip("no browser")
@pytest.mark.skip(reason="marked")
def test_b(): pass
@pytest.mark.xfail
def test_c(): assert 0
"""


@pytest.mark.parametrize(("ci", "expected"), [("true", "1 failed, 1 xfailed, 2 errors"), ("", "3 skipped, 1 xfailed")])
def test_a_skip_fails_in_ci_only(tmp_path: Path, ci: str, expected: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    args = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(args, capture_output=True, text=True, env=os.environ | {"CI": ci}, cwd=tmp_path)
    assert expected in done.stdout.splitlines()[-1], done.stdout
    assert (done.returncode != 0) == bool(ci)


@pytest.mark.parametrize(
    ("committed", "code", "passes"),
    [
        ("reward 0.412 after 3.2 s at 410.5 tokens/s", "reward 0.412 after 17 ms at 1,024 tokens/s", True),
        ("reward 0.412", "reward 0.413", False),
        ("peak 1.25 GiB (measured)", "peak 980 MiB (measured)", True),
        ("payload 1.25 MiB", "payload 1.50 MiB", False),
        ("<object at 0x7f00aa11bb22>", "<object at 0x7f99aa11bb99>", True),
    ],
)
def test_nbval_compares_results_and_not_times(tmp_path: Path, committed: str, code: str, passes: bool) -> None:
    output = [nbformat.v4.new_output("stream", text=committed + "\n")]
    path = notebook(tmp_path / "n.ipynb", source=f"print({code!r})", outputs=output)
    args = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        "--nbval-sanitize-with",
        str(ROOT / "tests/nbval_sanitize.cfg"),
    ]
    done = subprocess.run([*args, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode == 0) == passes, done.stdout
    assert ("2 passed" if passes else "1 failed, 1 passed") in done.stdout
