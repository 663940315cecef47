"""Which rank each layer gets: by patterns of names, and an allocation of a byte budget from measured gradient spectra.

The paper gives every matrix the same rank. Where gradients of some layers are larger or flatter in spectrum than others', the same bytes
keep more of the whole if the rank goes where the next direction holds the most energy for its bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..projection import input_name
from ..settings import ConfigError, SketchConfig


def layer_ranks(config: SketchConfig, names: Iterable[str]) -> dict[str, int]:
    """Rank of each layer, by canonical name: that of the pattern of `config.ranks` that matches, else `config.rank`.

    A pattern is one or more whole parts of a dotted name, anywhere in it ("down_proj", "layers.0.", "layers.0.mlp"); of several that match a
    layer, the one with the most parts counts.
    Raises:
        ConfigError: a pattern matches no layer, or two with equally many parts give a layer different ranks.
    """
    made, unmatched, problems = {}, set(config.ranks), []
    for name in names:
        matches = [p for p in config.ranks if f".{p.strip('.')}." in f".{name}."]
        unmatched.difference_update(matches)
        most = max((_parts(p) for p in matches), default=0)
        ranks = {config.ranks[p] for p in matches if _parts(p) == most} or {config.rank}
        if len(ranks) > 1:
            problems.append(f"{', '.join(repr(p) for p in matches if _parts(p) == most)} give {name!r} different ranks")
        made[name] = ranks.pop()
    problems += [f"{p!r} matches no sketched layer (they are like {next(iter(made), 'none')!r})" for p in sorted(unmatched)]
    if problems:
        raise ConfigError("SketchConfig.ranks: " + "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
    return made


def _parts(pattern: str) -> int:
    return pattern.strip(".").count(".") + 1


def accumulator_bytes(rows: int, width: int) -> int:
    """Bytes of one more rank of the one-sided sketch S [D, R] fp32."""
    return 4 * rows


def allocate_ranks(
    energy: Mapping[str, Sequence[float]],
    shapes: Mapping[str, tuple[int, int]],
    total_bytes: int,
    cost: Callable[[int, int], int] = accumulator_bytes,
    shared: bool = False,
) -> dict[str, int]:
    """Ranks r_l >= 1 that maximise Σ_l Σ_{i<=r_l} σ²_{l,i} with Σ_l r_l cost_l <= total_bytes: full names to `SketchConfig.ranks`.

    Water-filling: every next rank goes to the layer whose next σ² is largest for its bytes, so that in the end σ²/cost of the last direction
    kept is about the same everywhere. That is the optimum where the bytes are spent to the last one or costs are equal; else less than one
    direction worse. σ² of the next direction is what a sketch gains that finds the leading ones (two-sided, about so activation-aware).

    Args:
        energy: squared singular values of each layer's gradient, falling. shapes: (D, K). cost: bytes of one rank, of (D, K).
        shared: layers that read the same input get the same rank, as `share_inputs` needs it.
    Raises:
        ConfigError: names differ, a spectrum is empty, negative, not finite or not falling, or the bytes do not even give rank 1 to all.
    """
    if set(energy) != set(shapes):
        raise ConfigError(f"energy and shapes differ in {', '.join(sorted(set(energy) ^ set(shapes))[:5])}")
    spectra = {n: [float(e) for e in values][: min(shapes[n])] for n, values in energy.items()}
    for name, values in spectra.items():
        if not values or not all(0 <= b <= a < float("inf") for a, b in zip(values, values[1:] + [0.0])):
            raise ConfigError(f"energy of {name!r}: expected finite squared singular values >= 0, the largest first")
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(input_name(name) if shared else name, []).append(name)
    price = {g: sum(cost(*shapes[n]) for n in members) for g, members in groups.items()}
    most = {g: min(shapes[n][1] for n in members) for g, members in groups.items()}
    ranks, left = dict.fromkeys(groups, 1), total_bytes - sum(price.values())
    if left < 0:
        raise ConfigError(f"total_bytes = {total_bytes}: rank 1 for all {len(shapes)} layers takes {sum(price.values())}")

    def next_of(group: str) -> list[tuple[float, str]]:
        gain = sum(spectra[n][ranks[group]] for n in groups[group] if ranks[group] < len(spectra[n]))
        return [(-gain / price[group], group)] if gain > 0 and ranks[group] < most[group] else []

    heap = [item for g in groups for item in next_of(g)]
    heapq.heapify(heap)
    while heap:
        _, group = heapq.heappop(heap)
        if price[group] <= left:  # else none of its later ones fits either
            ranks[group], left = ranks[group] + 1, left - price[group]
            for item in next_of(group):
                heapq.heappush(heap, item)
    return {n: ranks[g] for g, members in groups.items() for n in members}
