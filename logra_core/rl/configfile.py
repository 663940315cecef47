"""Settings from a file and from the command line: YAML or JSON, with `dotted.key=value` overrides on top.

Belongs here: reading and merging text into a `TrainConfig`. What is allowed is decided by the dataclasses in settings.py alone.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ..settings import ConfigError, to_dict
from .settings import TrainConfig


def from_dict(cls: type, values: dict) -> Any:
    """Build `cls` (nested configs included) from a plain dict; unknown keys raise `ConfigError` with the known ones."""
    hints = get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(map(str, set(values) - known)):
        raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(n for n in hints if n in known)}")
    made = {}
    for name, value in values.items():
        hint = hints[name]
        made[name] = from_dict(hint, value) if dataclasses.is_dataclass(hint) and isinstance(value, dict) else value
    return cls(**made)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-5` as text; this reads it as a number. Of a name given twice it keeps the last; this refuses it."""

    def construct_mapping(self, node, deep=False):
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := sorted({str(name) for name in names if names.count(name) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d+$"), list("+-0123456789.")
)


def _parse(text: str, source: str) -> object:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None


def read_settings(path: str | os.PathLike) -> dict:
    """Names and values of a YAML or JSON file. Raises ConfigError if there is none, or it holds something else."""
    path = Path(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"config file {str(path)!r}: allowed are .yaml, .yml and .json")
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist")
    values = _parse(path.read_text(), f"config file {str(path)!r}") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {str(path)!r} holds a {type(values).__name__}; expected names and values")
    return values


def load_config(path: str | os.PathLike, overrides: tuple[str, ...] | list[str] = ()) -> TrainConfig:
    """TrainConfig from a YAML or JSON file and `dotted.key=value` overrides (values as in YAML); the rest keeps its default."""
    values = read_settings(path)
    for item in overrides:
        dotted, equals, text = item.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"argument {item!r}: expected dotted.key=value, for example optim.update_ratio=1e-3")
        place = values
        *parents, last = dotted.split(".")
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"argument {item!r}: {name!r} has no fields")
        place[last] = _parse(text, f"argument {item!r}")
    return from_dict(TrainConfig, _merge(to_dict(TrainConfig()), values))


def _merge(base: dict, values: dict) -> dict:
    """Nested update; so that naming one field of a nested config keeps the run's defaults of the others."""
    nested = {k: _merge(base[k], v) for k, v in values.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | values | nested
