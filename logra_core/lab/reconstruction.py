"""How much of a real PPO gradient survives the sketch: the cosine between G and SA, its theory, and the recorded study.

Belongs here: cosines and spectra as pure functions, dense PPO gradients of a policy, and the command that records them for
every layer, projection and rank:

    python -m logra_core.lab.reconstruction data/recipes/chain_sum_cpu.yaml --checkpoint data/runs/chain_sum_cpu/checkpoint

It goes on where it was stopped (layer by layer) and writes `data/runs/reconstruction_cosine.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from ..engines.policy import load_policy
from ..engines.rollout import Rollouts, TransformersRollout
from ..projection import ProjectionSpec, make_projection
from ..rl import checkpoint
from ..rl.configfile import load_config
from ..rl.ppo import ppo_loss, rewards_of, sequence_logprobs
from ..rl.runlog import RunLog, read_log, scrub
from ..rl.settings import TrainConfig
from ..rl.tasks import make_task, messages
from ..settings import ConfigError, to_dict
from ..sketch import select_targets
from ..sync import Weights

RANKS = (4, 16, 64, 256, 576, 1536)
MAX_ORTHONORMAL = 576  # orthonormalising more rows takes minutes a layer
TOP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # leading directions whose share of ‖G‖² is recorded
# What a row's cosines are called -> (distribution, whether A is redrawn from one gradient to the next).
KINDS = {
    "fixed rademacher": ("rademacher", False),
    "refreshed rademacher": ("rademacher", True),
    "refreshed gaussian": ("gaussian", True),
    "orthonormal": ("orthonormal", True),
}


def theory(distribution: str, rank: int, width: int) -> float:
    """Root mean square of cos(G, SA): √(r/(r+k)) for i.i.d. entries, √(r/k) for orthonormal rows, unit vectors
    included, whatever G is (METHOD section 8).

    The mean lies below it by a relative 1/(4 r n) or so for a gradient of effective rank n.
    """
    return math.sqrt(rank / width) if distribution in ("orthonormal", "coordinates") else math.sqrt(rank / (rank + width))


def cosines(G_DK: torch.Tensor, A_RK: torch.Tensor, ranks: tuple[int, ...]) -> list[float]:
    """cos(G, SA) at each rank r <= R, with A's first r rows as the rank-r projection (the recipe draws them that way).

    ⟨G, SA⟩ = ‖S‖² because S = G Aᵀ, and ‖SA‖² = ⟨SᵀS, AAᵀ⟩: the [D, K] product SA is never formed. Computed in float64 from
    fp32 products; G [D, K] fp32 not zero. The scale of A cancels.
    """
    if max(ranks) > len(A_RK):
        raise ConfigError(f"ranks = {ranks}: A has {len(A_RK)} rows")
    S_DR = G_DK @ A_RK.T
    inner_RR, gram_RR = (S_DR.T @ S_DR).double(), (A_RK @ A_RK.T).double()
    norm_G = float(G_DK.norm(dtype=torch.float64))
    made = []
    for r in ranks:
        square_S, square_SA = float(inner_RR.diagonal()[:r].sum()), float((inner_RR[:r, :r] * gram_RR[:r, :r]).sum())
        made.append(square_S / (norm_G * math.sqrt(square_SA)))
    return made


def spectrum(G_DK: torch.Tensor) -> torch.Tensor:
    """Squared singular values of G over their sum, descending, float64 [min(D, K)]."""
    G_DK = (G_DK if len(G_DK) <= G_DK.shape[1] else G_DK.T).double()
    square = torch.linalg.eigvalsh(G_DK @ G_DK.T).flip(0).clamp(min=0)
    return square / square.sum()


def effective_rank(share: torch.Tensor) -> float:
    """exp of the entropy of a spectrum that sums to 1: n equal directions count n, one alone counts 1."""
    share = share[share > 0]
    return float((-(share * share.log()).sum()).exp())


def layer_place(name: str) -> tuple[int, str]:
    """(depth, kind) of a canonical layer name: `model.layers.3.mlp.up_proj` -> (3, "up_proj")."""
    parts = name.split(".")
    return int(next(p for p in parts if p.isdigit())), parts[-1]


def policy_gradients(
    model: nn.Module, tokenizer, cfg: TrainConfig, rollouts: Rollouts, advantages: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Dense G [D, K] fp32 of every target for the PPO loss of one batch (METHOD section 6); the model is left without gradients.

    advantages: fp32 [B]. The weights must be those that generated `rollouts`.
    """
    layers = select_targets(model, cfg.sketch.targets)
    model.requires_grad_(False)
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for start in range(0, len(rollouts), cfg.ppo.microbatch):
        rows = list(range(start, min(start + cfg.ppo.microbatch, len(rollouts))))
        part = rollouts.select(rows)
        shared = part.shared(model)
        padded = part.padded(pad, skip=shared)
        logp = sequence_logprobs(model, padded, cfg.sampling.temperature, part.prompt_ids[0][:shared])
        given = (padded["rollout_logprobs"], advantages[rows], padded["response_mask"])
        ppo_loss(logp, *given, rollouts.tokens, cfg.ppo.clip, cfg.ppo.tis_cap)[0].backward()
    found = {n: layer.weight.grad for n, layer in layers.items()}
    for layer in layers.values():
        layer.weight.grad = None
    model.requires_grad_(False)
    return found


def measure(G_DK: torch.Tensor, name: str, batch: int, seed: int, drawn: dict | None = None) -> dict:
    """One row of the study: norm, effective rank, share of the leading directions, and a list of cosines over RANKS for each of KINDS.

    batch: which gradient; refreshed projections are of draw `batch`, the fixed one of draw 0. Ranks above k (or
    `MAX_ORTHONORMAL`) are None. drawn: keeps projections for the next gradients of the same layer.
    """
    width, share, drawn = G_DK.shape[1], spectrum(G_DK), {} if drawn is None else drawn
    ranks = tuple(r for r in RANKS if r <= width)
    row = {"norm": float(G_DK.norm()), "effective_rank": effective_rank(share), "top": [float(share[:n].sum()) for n in TOP], "cosines": {}}
    for kind, (distribution, refreshed) in KINDS.items():
        largest = min(ranks[-1], MAX_ORTHONORMAL) if distribution == "orthonormal" else ranks[-1]
        key = (distribution, batch if refreshed else 0)
        if key not in drawn:
            drawn[key] = make_projection(ProjectionSpec(seed, key[1], largest, distribution), name, width)
        values = cosines(G_DK, drawn[key], tuple(r for r in ranks if r <= largest))
        row["cosines"][kind] = values + [None] * (len(RANKS) - len(values))
    return row


def sample(model: nn.Module, tokenizer, cfg: TrainConfig, update: int) -> tuple[Rollouts, torch.Tensor]:
    """Responses of the policy to the training prompts of an update, and their verifiable rewards fp32 [B]."""
    task = make_task(cfg.task)
    try:
        problems = task.train(update, cfg.ppo.prompts_per_update, cfg.seed)
        prompts = [tokenizer.apply_chat_template(messages(p), add_generation_prompt=True, return_dict=False) for p in problems]
        rollouts = TransformersRollout(model, tokenizer, cfg.sketch.targets).generate(prompts, cfg.sampling, cfg.seed + update)
        return rollouts, rewards_of([g.correct for g in task.grade(rollouts.texts, problems)], cfg.ppo.failure_reward)
    finally:
        task.close()


def load_stage(cfg: TrainConfig, folder: Path | None):
    """(model, tokenizer, update, baseline) of the untrained policy, or of the newest checkpoint in `folder`."""
    model, tokenizer = load_policy(cfg.model or None)
    if folder is None:
        return model, tokenizer, 0, 0.0
    if (path := checkpoint.latest(folder)) is None:
        raise FileNotFoundError(f"no checkpoint in {folder}: run `python -m logra_core.rl.train` with the same recipe first")
    values, state = checkpoint.load(path)
    weights = Weights(select_targets(model, cfg.sketch.targets))
    with torch.no_grad():
        for name, value in values.items():
            weights.set_(name, value)
    if (ours := weights.fingerprint()) != state["fingerprint"]:
        raise checkpoint.CheckpointError(f"{path}: weights have fingerprint {ours}, saved {state['fingerprint']}")
    return model, tokenizer, int(state["update"]), float(state["baseline"]["value"])


def gradients(
    cfg: TrainConfig, stages: dict[str, Path | None], batches: int, log: RunLog | None
) -> dict[tuple[str, str, int], dict[str, torch.Tensor]]:
    """(stage, advantages, batch) -> layer -> G.

    "verified" advantages are reward − running baseline; "random" ones (batch 0 only) are N(0, 1).
    """
    made = {}
    for stage, folder in stages.items():
        model, tokenizer, update, baseline = load_stage(cfg, folder)
        for batch in tqdm(range(batches), desc=f"gradients, {stage}"):
            rollouts, rewards = sample(model, tokenizer, cfg, update + batch)
            made[stage, "verified", batch] = policy_gradients(model, tokenizer, cfg, rollouts, rewards - baseline)
            if batch == 0:
                noise = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(cfg.seed))
                made[stage, "random", 0] = policy_gradients(model, tokenizer, cfg, rollouts, noise)
            if log is not None:
                # the first batch in full, so that a reader can compute its gradient again
                parts = ("prompt_ids", "response_ids", "logprobs", "finish_reasons", "texts") if batch == 0 else ()
                whole = {k: getattr(rollouts, k) for k in parts}
                known = {"stage": stage, "update": update, "batch": batch, "baseline": baseline, "tokens": rollouts.tokens}
                log.row("rollouts", **known, rewards=rewards, **whole)
    return made


def open_record(out: Path, settings: dict, seed: int) -> tuple[RunLog, set[str]]:
    """The record of a study and the layers that it holds already. ConfigError for a file of other settings."""
    done: set[str] = set()
    if out.exists():
        header, rows = read_log(out)
        if header["settings"] != scrub(json.loads(json.dumps(settings))):
            raise ConfigError(f"{out} holds a study with other settings; choose another --out")
        done = {r["layer"] for r in rows if r["kind"] == "layer_done"}
        if not done:  # stopped before its first layer was whole
            out.unlink()
    if done:
        return RunLog.resume(out, lambda r: r["kind"] == "rollouts" or r["layer"] in done), done
    return RunLog(out, {"seed": seed, "settings": settings}), done


def study_parser(program: str, description: str, out: str) -> argparse.ArgumentParser:
    """What the command line of every recorded study takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("recipe", help="training recipe: policy, task, sampling, batch size")
    parser.add_argument("--checkpoint", required=True, type=Path, help="checkpoint folder of a run of that recipe: the later stage")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--every", type=int, default=2, help="measure one decoder layer in so many")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, as for the training command")
    return parser


def read_arguments(parser: argparse.ArgumentParser, arguments: list[str] | None) -> tuple[argparse.Namespace, TrainConfig]:
    """The arguments and the recipe they name; the recipe's number of threads is set."""
    args = parser.parse_args(arguments)
    cfg = load_config(args.recipe, args.overrides)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    return args, cfg


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser("logra_core.lab.reconstruction", "Record the reconstruction study.", "data/runs/reconstruction_cosine.jsonl")
    parser.add_argument("--batches", type=int, default=3, help="gradients a stage, each with its own prompts, responses and draw")
    args, cfg = read_arguments(parser, arguments)
    settings = {"train": to_dict(cfg), "batches": args.batches, "every": args.every, "ranks": RANKS, "top": TOP, "kinds": KINDS}
    log, done = open_record(args.out, settings, cfg.seed)
    found = gradients(cfg, {"untrained": None, "trained": args.checkpoint}, args.batches, None if done else log)
    names = [n for n in next(iter(found.values())) if layer_place(n)[0] % args.every == 0]
    for name in tqdm([n for n in names if n not in done], desc="layers"):
        drawn: dict = {}
        for (stage, advantages, batch), layers in found.items():
            row = measure(layers[name], name, batch, cfg.seed, drawn)
            log.row("gradient", layer=name, stage=stage, advantages=advantages, batch=batch, **{k: short(v) for k, v in row.items()})
        log.row("layer_done", layer=name)
    log.close()
    return 0


def short(value):
    """Numbers rounded to 4 significant digits, to keep the record small; containers too."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
