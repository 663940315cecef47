"""A dataclass that checks itself at construction, its way to a plain dict and back, and the two errors that all raise; no torch, no I/O."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A setting outside what is allowed; the message names field, value and range."""


class NonFiniteError(FloatingPointError):
    """A NaN or infinity was met before the step; weights and optimizer state are unchanged."""


def _matches(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_matches(v, get_args(hint)[0]) for v in value)
    if get_args(hint) and get_origin(hint) is not dict:  # unions
        return any(_matches(value, h) for h in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


class Checked:
    """Type check of every field, then the subclass's own range checks."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):  # JSON and YAML have no tuples
                object.__setattr__(self, f.name, value := tuple(value))
            if not _matches(value, hints[f.name]):
                raise ConfigError(f"{type(self).__name__}.{f.name} = {value!r} ({type(value).__name__}): expected {f.type}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{type(self).__name__}.{f.name} = {value!r}: expected a finite number")
        self._check()

    def _check(self) -> None:
        pass

    def _need(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name} = {getattr(self, name)!r}: allowed is {allowed}")

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        self._need(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))


def to_dict(config: Any) -> dict:
    """Plain nested dict of a config, for JSON and checkpoints."""
    return dataclasses.asdict(config)


def from_dict(cls: type, values: dict) -> Any:
    """Build `cls` (nested configs included) from a plain dict; unknown keys raise `ConfigError` with the known ones."""
    hints = get_type_hints(cls)
    unknown = sorted(map(str, set(values) - set(hints)))
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(hints)}")
    made = {}
    for name, value in values.items():
        hint = hints[name]
        made[name] = from_dict(hint, value) if dataclasses.is_dataclass(hint) and isinstance(value, dict) else value
    return cls(**made)
