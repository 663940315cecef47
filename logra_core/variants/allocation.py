"""Ranks of their own for some layers, by patterns of names. The paper gives every matrix the same rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..settings import ConfigError


def layer_ranks(rank: int, ranks: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Rank of each layer, by canonical name: that of the pattern of `ranks` that matches, else `rank`.

    A pattern is one or more whole parts of a dotted name, anywhere in it ("down_proj", "layers.0.", "layers.0.mlp"); of several that match a
    layer, the one with the most parts counts.
    Raises:
        ConfigError: a pattern matches no layer, or two with equally many parts give a layer different ranks.
    """
    made, unmatched, problems = {}, set(ranks), []
    for name in names:
        matches = [p for p in ranks if f".{p.strip('.')}." in f".{name}."]
        unmatched.difference_update(matches)
        most = max((_parts(p) for p in matches), default=0)
        found = {ranks[p] for p in matches if _parts(p) == most} or {rank}
        if len(found) > 1:
            problems.append(f"{', '.join(repr(p) for p in matches if _parts(p) == most)} give {name!r} different ranks")
        made[name] = found.pop()
    problems += [f"{p!r} matches no sketched layer (they are like {next(iter(made), 'none')!r})" for p in sorted(unmatched)]
    if problems:
        raise ConfigError("SketchConfig.ranks: " + "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
    return made


def _parts(pattern: str) -> int:
    return pattern.strip(".").count(".") + 1
