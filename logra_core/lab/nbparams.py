"""Parameters of notebooks, checked before anything starts: names, types, parameter files.

Belongs here: reading the `parameters` cell, turning words and YAML into the types of its defaults, and every refusal.
Papermill alone would run with a misspelt name, a text for a number, or a notebook without such a cell.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

SCALARS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "None": type(None)}


class ParameterError(ValueError):
    """A notebook without exactly one parameters cell, an unknown name or a value of the wrong type."""


@dataclass(frozen=True)
class Default:
    """A parameter's default and the types that its annotation, or else its default, allows."""

    value: Any
    allowed: tuple[type, ...]  # empty: any (a bare None says nothing)

    @classmethod
    def of(cls, value: Any) -> Default:
        return cls(value, () if value is None else (type(value),))

    def describe(self) -> str:
        names = [t.__name__.replace("NoneType", "None").replace("float", "a finite float") for t in self.allowed]
        return " or ".join(names) or "anything finite"


class _UniqueLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice (plain YAML lets the second win)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise ParameterError(f"parameter file: given twice: {', '.join(twice)} (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def _leaves(value: Any) -> set[type]:
    """The type of `value` and of everything inside it."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else []
    return {type(value)}.union(*map(_leaves, inner))


def notebook_parameters(notebook: Path) -> dict[str, Default]:
    """Names and defaults in the one cell tagged `parameters`, which may only assign literals to names.

    Raises:
        ParameterError: no such cell, more than one, or a cell that computes something (an override would not reach it).
    """
    nb = nbformat.read(notebook, as_version=4)
    cells = [c for c in nb.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ParameterError(f"{notebook.name}: {len(cells)} code cells are tagged `parameters`; exactly one is needed")
    found: dict[str, Default] = {}
    try:
        for node in ast.parse(cells[0].source).body:
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else getattr(node, "target", None)
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(target, ast.Name) or node.value is None:
                raise ValueError(ast.unparse(node))
            value = ast.literal_eval(node.value)
            if _leaves(value) - set(SCALARS.values()):
                raise ValueError(f"{ast.unparse(node)} (a tuple or another type that papermill would pass on as text; use a list)")
            default = Default.of(value)
            if isinstance(node, ast.AnnAssign):
                names = [n.strip() for n in ast.unparse(node.annotation).split("|")]
                default = Default(value, tuple(SCALARS[n.split("[")[0]] for n in names))
            found[target.id] = default
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise ParameterError(f"{notebook.name}: the parameters cell may hold only `name = literal` lines; got: {error}") from None
    return found


def _from_word(word: str, default: Default) -> Any:
    """A word of the command line as the value it stands for; what stays text is judged by `_typed`."""
    allowed = default.allowed
    if word in ("None", "null") and (type(None) in allowed or not allowed):
        return None
    if str in allowed or not allowed:
        return word
    if list in allowed or dict in allowed:
        return yaml.load(word, _UniqueLoader)
    if int in allowed and re.fullmatch(r"[+-]?\d+(_\d+)*", word):
        return int(word)
    if bool in allowed and word.lower() in ("true", "false"):
        return word.lower() == "true"
    return word


def _typed(value: Any, default: Default) -> Any:
    """`value` as one of the allowed types, else ValueError. An int or a text such as 1e-5 (YAML's reading) may stand for a float."""
    allowed, like = default.allowed, default.value
    if isinstance(value, list) and list in allowed:
        return [_typed(v, Default.of(like[0])) if isinstance(like, list) and like else v for v in value]
    if isinstance(value, dict) and dict in allowed:
        return {k: _typed(v, Default.of(like[k])) if isinstance(like, dict) and k in like else v for k, v in value.items()}
    if allowed and type(value) not in allowed:
        if float not in allowed or type(value) not in (int, str):
            raise ValueError
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value) and not (isinstance(like, float) and not math.isfinite(like)):
        raise ValueError
    return value


def check_parameters(notebook: Path, given: dict[str, Any], text: bool = False) -> dict[str, Any]:
    """`given` as values of the notebook's own types.

    Args:
        given: parameter name -> value. text: the values are words of the command line.
    Raises:
        ParameterError: names every unknown parameter (with close ones) and every value of a wrong type.
    """
    known = notebook_parameters(notebook)
    checked, faults = {}, []
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else f"it has: {', '.join(known) or 'none'}"
            faults.append(f"unknown parameter {name!r}; {hint}")
            continue
        try:
            checked[name] = _typed(_from_word(value, known[name]) if text else value, known[name])
        except (ValueError, TypeError, OverflowError, yaml.YAMLError):
            given_type = "" if text else f" ({type(value).__name__})"
            faults.append(f"{name} = {value!r}{given_type}: expected {known[name].describe()}; its default is {known[name].value!r}")
    if faults:
        raise ParameterError(f"{notebook.name}: " + "; ".join(faults))
    return checked


def read_parameter_file(path: Path) -> dict[str, dict[str, Any]]:
    """Notebook stem -> parameters, from YAML such as `07_ppo_cpu: {updates: 30}`."""
    data = yaml.load(path.read_text(), _UniqueLoader) or {}
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise ParameterError(f"{path.name}: expected a mapping from notebook name to a mapping of parameters")
    return data


def plan(notebooks: list[Path], words: dict[str, str], file: dict[str, dict[str, Any]]) -> list[tuple[Path, dict[str, Any]]]:
    """Every notebook with its checked parameters, before anything starts. A word of the command line wins over the file.

    Raises:
        ParameterError: all faults of all notebooks in one message.
    """
    faults, jobs = [], []
    for path in notebooks:
        if not path.is_file():
            faults.append(f"{path}: no such notebook")
    if len({p.stem for p in notebooks}) < len(notebooks):
        faults.append("two notebooks have the same name; their outputs would overwrite each other")
    near = {p.stem for n in notebooks for p in n.parent.glob("*.ipynb")} | {n.stem for n in notebooks}
    for stem in file:
        if stem not in near:
            close = difflib.get_close_matches(str(stem), near, n=3)
            faults.append(f"parameter file: no notebook {stem!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    for path in notebooks if not faults else []:
        try:
            values = check_parameters(path, file.get(path.stem, {}))
            jobs.append((path, values | check_parameters(path, words, text=True)))
        except ValueError as error:  # a file that is no notebook is reported like a bad parameter
            faults.append(str(error))
    if faults:
        raise ParameterError("\n".join(faults))
    return jobs
