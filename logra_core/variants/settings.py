"""The switches beyond the paper as settings: subclasses of the core's that bring their own sketches, rules and roundings.

All are off by default, which is the paper's method. Belongs here: fields, what goes with what, and which classes they choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from .. import settings as core
from ..optim import Rule
from ..projection import Projection, ProjectionSpec
from ..settings import RULES, ConfigError
from ..sketch import LayerSketch
from ..weights import Masters
from .activation import FoundSource, RangeFinder
from .allocation import layer_ranks
from .inputs import STORAGES, Products, Source, SourcedSketch, input_name
from .momentum import MomentumRule, check_momentum
from .rounding import Stochastic
from .two_sided import TwoSidedSketch, sizes

KINDS = ("one_sided", "two_sided")
PROJECTIONS = ("random", "activation")


@dataclass(frozen=True)
class SketchConfig(core.SketchConfig):
    """The core's settings and the switches of METHOD section 8.

    ranks: other ranks for some layers, by parts of their names (allocation.py). refresh_every: redraw A after so many updates.
    kind: two_sided accumulates G Ωᵀ and Ψ G instead of G Aᵀ (two_sided.py), Ω with r/2 rows and Ψ with r; equal_bytes: sized
    instead to what the one-sided sketch of rank r accumulates. projection: activation takes A from the layers' inputs as seen in a
    scoring pass (activation.py) of `scored_responses` responses of the batch (0: all); complement: share of random rows in that A;
    drop_leading: so many of the strongest directions are kept out of it (only they: rank of that number, complement 0).
    share_inputs: layers that read the same input (q, k, v; gate, up) share one A and one product x Aᵀ.
    projection_storage: how a random one-sided A is kept between its uses: fp32 (and in the compute dtype), or bits (Rademacher's signs, one
    bit an entry). The entries are the same; bits pay with time at each use.
    """

    ranks: dict[str, int] = field(default_factory=dict)
    refresh_every: int = 1
    kind: str = "one_sided"
    equal_bytes: bool = False
    projection: str = "random"
    complement: float = 0.125
    drop_leading: int = 0
    scored_responses: int = 16
    share_inputs: bool = False
    projection_storage: str = "fp32"

    free = ("projection_storage",)  # changes no number, so a run may change it when it resumes

    def _check(self) -> None:
        super()._check()
        valid = all(isinstance(p, str) and p.strip(".") and type(r) is int and r >= 1 for p, r in self.ranks.items())
        self._need("ranks", valid, "a rank >= 1 for each part of a name")
        for name, allowed in (("kind", KINDS), ("projection", PROJECTIONS), ("projection_storage", STORAGES)):
            self._choice(name, allowed)
        self._need("complement", 0 <= self.complement <= 1, "0 <= complement <= 1")
        self._need("drop_leading", self.drop_leading >= 0, ">= 0")
        self._need("drop_leading", self.projection == "activation" or not self.drop_leading, "0 where projection is not activation")
        self._need("scored_responses", self.scored_responses >= 0, ">= 0")
        two_sided = self.kind == "two_sided"
        self._need("equal_bytes", two_sided or not self.equal_bytes, "false unless kind is two_sided")
        self._need("projection", self.projection == "random" or not two_sided, "random where kind is two_sided")
        stays = not self.refresh or self.refresh_every != 1
        self._need("refresh_every", self.refresh_every >= 1 and (self.refresh or self.refresh_every == 1), ">= 1, and 1 where refresh is false")
        self._need("projection", self.projection == "random" or not stays, "random where refresh is false or refresh_every above 1")
        self._need("share_inputs", not (two_sided and self.share_inputs), "false where kind is two_sided (its products need x, not P)")
        kept = self.projection_storage == "fp32"
        self._need("projection_storage", kept or self.projection == "random", "fp32 where projection is activation (no seed gives that A)")
        self._need("projection_storage", kept or not two_sided, "fp32 where kind is two_sided (its backward needs Ω and Ψ again)")
        self._need("projection_storage", kept or self.distribution == "rademacher", "bits with rademacher only")

    def draw(self, version: int) -> tuple[int, int]:
        return divmod(version, self.refresh_every) if self.refresh else (0, version)

    def sketcher(self, layers: dict[str, nn.Linear], config: core.SketchConfig, wire_dtype: torch.dtype) -> dict[str, LayerSketch]:
        """The sketches that these settings name (`sketch.attach` calls this)."""
        ranks = layer_ranks(self.rank, self.ranks, layers)
        specs = {n: ProjectionSpec(self.seed, 0, rank, self.distribution) for n, rank in ranks.items()}
        if self.kind == "two_sided":
            return {n: TwoSidedSketch(n, layer, specs[n], self.equal_bytes) for n, layer in layers.items()}
        if self.projection == "activation":
            if small := [n for n, layer in layers.items() if layer.in_features < ranks[n] + self.drop_leading]:
                width, more = layers[small[0]].in_features, f" (and drop_leading {self.drop_leading} more)" if self.drop_leading else ""
                raise ConfigError(f"SketchConfig.rank = {ranks[small[0]]}{more}: orthonormal rows need rank <= inputs, but {small[0]!r} has {width}")
        made, everyone = {}, []
        for members in _readers(layers, self.share_inputs):
            first, width = members[0], layers[members[0]].in_features
            if len({ranks[n] for n in members}) > 1:
                raise ConfigError(f"SketchConfig.ranks: {' and '.join(members)} share one input, so they need the same rank")
            projection = Projection(specs[first], input_name(first) if self.share_inputs else first, width)
            source = Source(projection, self.projection_storage)
            if self.projection == "activation":
                finder = RangeFinder(specs[first], first, width, self.complement, wire_dtype, self.drop_leading)
                source = FoundSource(projection, "fp32", finder, everyone)
            products = Products() if self.share_inputs else None
            made |= {n: SourcedSketch(n, layers[n], source, products) for n in members}
        return made

    def accumulated(self, rows: int, width: int) -> int:
        """fp32 values that the sketch of one layer W [D, K] accumulates: D·r, or D·q + p·K."""
        if self.kind == "one_sided":
            return rows * self.rank
        q, p = sizes(self.rank, self.equal_bytes, rows, width)
        return rows * q + p * width


def _readers(layers: dict[str, nn.Linear], share: bool) -> list[list[str]]:
    """Layers in groups that read the same input (q, k, v; gate, up); each by itself without sharing."""
    groups: dict[tuple, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((input_name(name) if share else name, layer.in_features), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class OptimConfig(core.OptimConfig):
    """The core's settings and two switches.

    beta1: what the rule turns into a step is a running mean of the sketches with that decay, as in Adam (0, the paper's: the last sketch);
    it needs an A that stays for some updates (one_sided, random, refresh false or refresh_every above 1; a new A starts a new mean) and as
    much memory again as the sketches. stochastic_rounding: the model is bf16 and no fp32 masters are kept, neither here nor in the
    engines: a merge rounds to bf16 up or down with the probability that keeps the mean (rounding.py), by the seed of the sketch.
    """

    beta1: float = 0.0
    stochastic_rounding: bool = False

    def _check(self) -> None:
        super()._check()
        self._need("beta1", 0 <= self.beta1 < 1, "0 <= beta1 < 1")

    def make_rule(self, sketch: core.SketchConfig) -> Rule:
        check_momentum(sketch, self)
        return MomentumRule(RULES[self.rule], self.beta1) if self.beta1 else RULES[self.rule]

    def make_rounding(self) -> Masters:
        return Stochastic() if self.stochastic_rounding else Masters()


@dataclass(frozen=True)
class KLConfig(core.KLConfig):
    """The core's settings and that of the estimator `score_sketch` (score.py).

    score_samples: tokens drawn at each context, a backward pass each; q is then known to about √(2 / (probe_responses · score_samples)).
    """

    score_samples: int = 8

    def _check(self) -> None:
        super()._check()
        self._need("score_samples", self.score_samples >= 1, ">= 1")
