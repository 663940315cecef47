"""Which room may import which: the core at the bottom, one way, no circle; read from the sources, imports inside functions too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "logra_core"
CORE = {"__init__", "settings", "projection", "sketch", "optim", "kl", "weights", "sync"}
# A room -> the rooms it may import, beside itself. "" is the core, the files at the top.
ROOMS = {
    "": set(),
    "variants": {""},
    "parallel": {"", "variants"},
    "engines": {"", "variants"},
    "rl": {"", "variants", "parallel", "engines"},
    "planning": {"", "variants", "parallel", "engines", "rl"},
    "integrations": {"", "variants", "engines"},
    "lab": {"", "variants", "parallel", "engines", "rl", "planning", "integrations"},
}
THIRD_PARTY = {"torch", "numpy", "xxhash", "safetensors"}  # what the core may import beside the standard library
OPTIONAL = {"vllm", "trl", "peft"}  # a module that needs one of these at its top may be imported inside a function
CORE_LINES = 2000


def sources(root: Path) -> dict[str, str]:
    """Module name below the package -> source."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path.read_text()
    return found


def room(module: str) -> str:
    return module.partition(".")[0] if "." in module else ""


def imports(module: str, source: str, modules: set[str]) -> list[tuple[str, bool, int]]:
    """(imported module, whether inside a function, line) of every import of our own."""
    tree, found = ast.parse(source), []
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) for n in ast.walk(f)}
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            elif (node.module or "").split(".")[0] == PACKAGE:
                base = node.module.split(".")[1:]
            else:
                continue
            targets = [".".join([*base, a.name]) for a in node.names]
            own = [t if t in modules else ".".join(base) for t in targets]
        elif isinstance(node, ast.Import):
            own = [a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == PACKAGE]
        else:
            continue
        for name in own:
            name = name if name in modules else ".".join(filter(None, [name, "__init__"]))
            if name in modules and name != module:
                found.append((name, id(node) in inside, node.lineno))
    return found


def needs_optional(source: str) -> bool:
    """Whether a module imports an optional third-party package as it is imported itself."""
    names = [a.name for n in ast.parse(source).body if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in ast.parse(source).body if isinstance(n, ast.ImportFrom) and not n.level]
    return any(name.split(".")[0] in OPTIONAL for name in names)


def breaches(found: dict[str, str]) -> list[str]:
    """What the sources break of the rules above."""
    modules, problems, edges = set(found), [], {}
    for module, source in found.items():
        edges[module] = []
        for target, inside, line in imports(module, source, modules):
            edges[module].append(target)
            if room(target) not in ROOMS.get(room(module), set()) | {room(module)}:
                problems.append(f"{module}:{line} imports {target}: {room(module) or 'the core'} may not import {room(target) or 'the core'}")
            if inside and not needs_optional(found[target]):
                problems.append(f"{module}:{line} imports {target} inside a function")
    problems += [f"imports go in a circle: {' -> '.join(circle)}" for circle in circles(edges)]
    strangers = {m for m in found if not room(m)} - CORE
    return problems + [f"{m}.py lies at the top, which holds the method alone" for m in sorted(strangers)]


def circles(edges: dict[str, list[str]]) -> list[list[str]]:
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(path[path.index(module) :] + [module])
        elif module not in done:
            for target in edges[module]:
                visit(target, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def test_imports_go_one_way() -> None:
    assert breaches(sources(ROOT)) == []


@pytest.mark.parametrize(
    ("module", "line", "needle"),
    [
        ("sketch", "from .variants.two_sided import rebuild", "the core may not import variants"),
        ("sketch", "def f():\n    from .variants import two_sided", "the core may not import variants"),
        ("engines.group", "import logra_core.rl.ppo", "engines may not import rl"),
        ("projection", "from .sketch import Target", "imports go in a circle"),
        ("rl.ppo", "def f():\n    from ..kl import exact_kl", "rl.ppo:2 imports kl inside a function"),
        ("extra", "", "extra.py lies at the top"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str, needle: str) -> None:
    found = sources(ROOT)
    found[module] = line + "\n" + found.get(module, "").replace("from __future__ import annotations", "")
    assert any(needle in problem for problem in breaches(found))


def test_the_core_needs_four_packages_and_fits_an_hour() -> None:
    core = {m: s for m, s in sources(ROOT).items() if not room(m)}
    for module, source in core.items():
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            unknown = {n.split(".")[0] for n in names} - THIRD_PARTY - set(sys.stdlib_module_names)
            assert not unknown, f"{module} imports {unknown}"
    assert sum(len(s.splitlines()) for s in core.values()) <= CORE_LINES
    done = subprocess.run(
        [sys.executable, "-c", "import logra_core, sys; print({'vllm', 'transformers', 'trl'} & set(sys.modules))"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
