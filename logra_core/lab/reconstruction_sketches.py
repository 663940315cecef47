"""How much of a real PPO gradient each kind of sketch keeps, at equal accumulated values: the second recorded study.

Belongs here: cosines of the sketches of METHOD section 8 beside the published one, measured with the code that trains. Policies, batches
and dense gradients are those of reconstruction.py. For every layer, training stage, kind and rank:

    python -m logra_core.lab.reconstruction_sketches data/recipes/chain_sum_cpu.yaml ppo.prompts_per_update=128 \\
        --checkpoint data/runs/chain_sum_cpu/checkpoint

It goes on where it was stopped (layer by layer) and writes `data/runs/reconstruction_sketches.jsonl`.
"""

from __future__ import annotations

import contextlib

import torch
from tqdm.auto import tqdm

from ..engines.rollout import Rollouts
from ..projection import Projection, ProjectionSpec, make_projection
from ..rl.ppo import sequence_logprobs
from ..rl.runlog import read_log
from ..rl.settings import TrainConfig
from ..settings import to_dict
from ..sketch import Target, select_targets
from ..variants.activation import FoundSource, RangeFinder, leading_rows, observe
from ..variants.inputs import SourcedSketch
from ..variants.settings import SketchConfig
from ..variants.two_sided import LEFT, rebuild, sizes
from .reconstruction import (  # fmt: skip
    cosines,
    effective_rank,
    layer_place,
    load_stage,
    open_record,
    policy_gradients,
    read_arguments,
    sample,
    short,
    spectrum,
    study_parser,
)

RANKS = (4, 16, 64, 256)
# What a row's cosines are called -> how the sketch is made. "best" is the best approximation of rank r, which no sketch can pass.
KINDS = {
    "rademacher": {"distribution": "rademacher"},
    "orthonormal": {"distribution": "orthonormal"},
    "hadamard": {"distribution": "hadamard"},
    "activation": {"projection": "activation", "complement": 0.0},
    "activation with complement": {"projection": "activation", "complement": 0.125},
    "two-sided": {"kind": "two_sided", "distribution": "gaussian"},
    "two-sided, equal bytes": {"kind": "two_sided", "distribution": "gaussian", "equal_bytes": True},
    "best": {},
}
# Where the cosine of "activation" comes from: rank 16 without the strongest input directions, and those directions alone.
OUTLIERS = {f"without the leading {m}": {"rank": 16, "drop_leading": m} for m in (1, 4, 16)} | {f"only the leading {m}": {"rank": m} for m in (1, 4)}
OUTLIERS = {name: {"projection": "activation", "complement": 0.0} | switches for name, switches in OUTLIERS.items()}
FOUND = tuple(sorted({*RANKS, *(a["rank"] + a.get("drop_leading", 0) for a in OUTLIERS.values())}))  # directions that range finders look for


def observe_inputs(model, tokenizer, cfg: TrainConfig, rollouts: Rollouts, scored: int) -> dict[tuple[str, int], RangeFinder]:
    """(layer, rank) -> the range finder of its input, fed as in training with the first `scored` responses, for the ranks of `FOUND`."""
    layers = select_targets(model, cfg.sketch.targets)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    groups = []
    for rank in FOUND:
        spec = ProjectionSpec(cfg.seed, 0, rank, "gaussian")
        group, everyone = [], []
        for name, layer in layers.items():
            if layer.in_features >= rank:
                finder = RangeFinder(spec, name, layer.in_features, 0.0, torch.float32)
                source = FoundSource(Projection(spec, name, layer.in_features), "fp32", finder, everyone)
                group.append(Target(name, layer, SourcedSketch(name, layer, source)))
        groups.append(group)
    for rows in torch.arange(min(scored, len(rollouts))).split(cfg.ppo.microbatch):
        part = rollouts.select(rows.tolist())
        shared = part.shared(model)
        padded = part.padded(pad, skip=shared)
        with contextlib.ExitStack() as stack:
            for group in groups:
                stack.enter_context(observe(group, padded["attention_mask"], shared))
            sequence_logprobs(model, padded, cfg.sampling.temperature, part.prompt_ids[0][:shared])
    return {(t.name, t.spec.rank): t.how.source.finder for group in groups for t in group}


def factor_cosine(G_DK: torch.Tensor, S_DR: torch.Tensor, V_RK: torch.Tensor) -> float:
    """cos(G, S V) without the [D, K] product: ⟨G Vᵀ, S⟩ / (‖G‖ ‖S V‖), in float64 from fp32 products."""
    gram_RR = (V_RK @ V_RK.T).double() * (S_DR.T @ S_DR).double()
    inner = ((G_DK @ V_RK.T).double() * S_DR.double()).sum()
    return float(inner / (G_DK.norm(dtype=torch.float64) * gram_RR.sum().sqrt()))


def measure(G_DK: torch.Tensor, name: str, seed: int, finders: dict[int, RangeFinder], drawn: dict) -> dict:
    """One row: norm, effective rank, and per kind a list over RANKS of [cosine, fp32 values accumulated]; None where a kind has no such rank.

    In `outliers`, such a pair per arm of OUTLIERS. finders: rank -> of this layer's input at this stage. drawn: keeps projections for the
    next gradients of the same layer.
    """
    rows, width = G_DK.shape
    share, made = spectrum(G_DK), {kind: [] for kind in KINDS}
    for rank in RANKS:
        for kind, switches in KINDS.items():
            config = SketchConfig(rank=rank, **switches)
            if kind == "best":
                made[kind].append([float(share[:rank].sum().sqrt()), rank * (rows + width)])
            elif rank > width and (config.distribution != "rademacher" or config.projection == "activation") and config.kind == "one_sided":
                made[kind].append(None)
            else:
                made[kind].append([_cosine(G_DK, name, seed, config, finders, drawn), config.accumulated(rows, width)])
    outliers = {}
    for arm, switches in OUTLIERS.items():
        config = SketchConfig(**switches)
        fits = config.rank + config.drop_leading <= width
        outliers[arm] = [_cosine(G_DK, name, seed, config, finders, drawn), config.accumulated(rows, width)] if fits else None
    return {"norm": float(G_DK.norm()), "effective_rank": effective_rank(share), "cosines": made, "outliers": outliers}


def _cosine(G_DK, name: str, seed: int, config: SketchConfig, finders: dict[int, RangeFinder], drawn: dict) -> float:
    rows, width = G_DK.shape

    def draw(rank: int, columns: int, of: str) -> torch.Tensor:
        key = (config.distribution, rank, of)
        if key not in drawn:
            drawn[key] = make_projection(ProjectionSpec(seed, 0, rank, config.distribution), of, columns)
        return drawn[key]

    if config.kind == "two_sided":
        q, p = sizes(config.rank, config.equal_bytes, rows, width)
        Psi_PD = draw(p, rows, name + LEFT)
        return factor_cosine(G_DK, *rebuild(G_DK @ draw(q, width, name).T, Psi_PD @ G_DK, Psi_PD))
    if config.projection == "activation":
        finder = finders[config.rank + config.drop_leading]
        key = (id(finder), config.complement, config.drop_leading)
        if key not in drawn:
            drawn[key] = leading_rows(finder._sum_RK, finder._random_rows, config.complement, name, config.drop_leading)
        return cosines(G_DK, drawn[key], (config.rank,))[0]
    return cosines(G_DK, draw(config.rank, width, name), (config.rank,))[0]


def summary(rows: list[dict], kinds: dict = KINDS) -> str:
    """Mean cosine over layers by stage, advantages, kind and rank, and the accumulated values over those of Rademacher: a table in text."""
    lines = []
    for place in dict.fromkeys((r["stage"], r["advantages"]) for r in rows):
        chosen = [r["cosines"] for r in rows if (r["stage"], r["advantages"]) == place]
        lines.append(f"{place[0]}, {place[1]} advantages, {len(chosen)} layers:")
        for kind in kinds:
            cells = []
            for i, rank in enumerate(RANKS):
                pairs = [(c[kind][i], c["rademacher"][i]) for c in chosen if c[kind][i] is not None]
                if pairs:
                    size = sum(p[0][1] for p in pairs) / sum(p[1][1] for p in pairs)
                    cells.append(f"r = {rank}: {sum(p[0][0] for p in pairs) / len(pairs):.3f} (x {size:.2f})")
            lines.append(f"  {kind:<27}" + "   ".join(cells))
        arms = [r["outliers"] for r in rows if (r["stage"], r["advantages"]) == place and "outliers" in r]
        for arm in arms[0] if arms else ():
            values = [a[arm][0] for a in arms if a[arm] is not None]
            if values:
                lines.append(f"  {arm:<27}r = {OUTLIERS[arm]['rank']}: {sum(values) / len(values):.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser("logra_core.lab.reconstruction_sketches", "Record the study of sketch kinds.", "data/runs/reconstruction_sketches.jsonl")
    args, cfg = read_arguments(parser, arguments)
    log, done = open_record(args.out, {"train": to_dict(cfg), "every": args.every, "ranks": RANKS, "kinds": KINDS, "outliers": OUTLIERS}, cfg.seed)
    found, finders = {}, {}
    for stage, folder in {"untrained": None, "trained": args.checkpoint}.items():
        model, tokenizer, update, baseline = load_stage(cfg, folder)
        rollouts, rewards = sample(model, tokenizer, cfg, update)
        finders[stage] = observe_inputs(model, tokenizer, cfg, rollouts, cfg.sketch.scored_responses)
        noise = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(cfg.seed))
        for advantages, values in (("verified", rewards - baseline), ("random", noise)):
            tqdm.write(f"{stage}: gradients of {len(rollouts)} responses, {advantages} advantages")
            found[stage, advantages] = policy_gradients(model, tokenizer, cfg, rollouts, values)
        if not done:
            log.row("rollouts", stage=stage, update=update, baseline=baseline, tokens=rollouts.tokens, rewards=rewards)
    names = [n for n in found["untrained", "random"] if layer_place(n)[0] % args.every == 0]
    for name in tqdm([n for n in names if n not in done], desc="layers"):
        drawn: dict = {}
        for (stage, advantages), layers in found.items():
            ranks = {rank: f for (n, rank), f in finders[stage].items() if n == name}
            row = measure(layers[name], name, cfg.seed, ranks, drawn)
            log.row("gradient", layer=name, stage=stage, advantages=advantages, **{k: short(v) for k, v in row.items()})
        log.row("layer_done", layer=name)
    log.close()
    print(summary([r for r in read_log(args.out)[1] if r["kind"] == "gradient"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
