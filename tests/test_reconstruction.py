"""Cosines between a gradient and what its sketch keeps: against the plain formula, against theory, and the recording command."""

import json
import math

import pytest
import torch
from tiny import tiny_policy

from logra_core import ConfigError, LoGRA, ProjectionSpec, make_projection
from logra_core.lab.reconstruction import (  # fmt: skip
    KINDS,
    RANKS,
    TOP,
    cosines,
    effective_rank,
    layer_place,
    load_stage,
    main,
    measure,
    policy_gradients,
    sample,
    spectrum,
    theory,
)
from logra_core.rl.configfile import load_config
from logra_core.rl.ppo import ppo_loss, sequence_logprobs
from logra_core.rl.runlog import read_log
from logra_core.rl.trainer import Trainer


def gradient(d: int, k: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(d, k, generator=g) if rank is None else torch.randn(d, rank, generator=g) @ torch.randn(rank, k, generator=g)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "orthonormal", "coordinates"])
def test_cosines_equal_the_plain_formula_at_every_rank(distribution):
    G_DK, ranks = gradient(40, 48, 3), (1, 4, 16, 48)
    found = cosines(G_DK, make_projection(ProjectionSpec(0, 0, 48, distribution), "l.0.x", 48), ranks)
    for r, value in zip(ranks, found, strict=True):
        A_RK = make_projection(ProjectionSpec(0, 0, r, distribution), "l.0.x", 48).double()  # drawn at that rank
        R_DK = G_DK.double() @ A_RK.T @ A_RK
        assert value == pytest.approx(float((G_DK.double() * R_DK).sum() / (G_DK.double().norm() * R_DK.norm())), abs=1e-5)
    with pytest.raises(ConfigError, match="48 rows"):
        cosines(G_DK, torch.ones(48, 48), (64,))


@pytest.mark.parametrize("rank_of_G", [1, 8, None])
def test_root_mean_square_cosine_is_the_theory_whatever_the_gradient_is(rank_of_G):
    G_DK, ranks, width = gradient(64, 96, rank_of_G), (4, 16, 96), 96
    for distribution in ("rademacher", "gaussian", "orthonormal", "coordinates"):
        draws = [cosines(G_DK, make_projection(ProjectionSpec(0, t, 96, distribution), "l.0.x", width), ranks) for t in range(200)]
        for i, r in enumerate(ranks):
            root = math.sqrt(sum(d[i] ** 2 for d in draws) / len(draws))
            assert root == pytest.approx(theory(distribution, r, width), abs=0.02), (distribution, r)


def test_theory_gives_the_papers_two_numbers():
    widths = [1536] * 6 + [8960]  # q, k, v, o, gate, up; down
    assert [round(sum(theory("rademacher", r, k) for k in widths) / 7, 3) for r in (4, 256)] == [0.047, 0.348]
    assert theory("orthonormal", 64, 64) == 1 and theory("rademacher", 64, 64) == pytest.approx(math.sqrt(0.5))


def test_effective_rank_counts_equal_directions():
    share = spectrum(torch.eye(7)[:, :5])
    assert effective_rank(share) == pytest.approx(5) and float(share.sum()) == pytest.approx(1)
    assert layer_place("model.layers.12.mlp.up_proj") == (12, "up_proj")
    assert effective_rank(spectrum(gradient(30, 20, 1))) == pytest.approx(1, abs=1e-3)
    assert spectrum(gradient(30, 20)).shape == spectrum(gradient(20, 30)).shape == (20,)


def test_a_row_has_every_kind_and_marks_ranks_beyond_the_layer():
    row = measure(gradient(24, 64), "model.layers.0.mlp.up_proj", 1, 0)
    assert set(row["cosines"]) == set(KINDS) and len(row["top"]) == len(TOP) and row["top"][-1] == pytest.approx(1)
    assert all(len(v) == len(RANKS) and [x is None for x in v] == [r > 64 for r in RANKS] for v in row["cosines"].values())
    assert row["cosines"]["orthonormal"][2] == pytest.approx(1, abs=1e-5)  # r = k: nothing is lost
    fixed, refreshed = row["cosines"]["fixed rademacher"], row["cosines"]["refreshed rademacher"]
    assert fixed != refreshed  # batch 1: draw 0 against draw 1
    assert measure(gradient(24, 64), "model.layers.0.mlp.up_proj", 0, 0)["cosines"]["fixed rademacher"] == fixed


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe for a tiny policy, trained for two updates: (path of the recipe, checkpoint folder)."""
    folder = tmp_path_factory.mktemp("study")
    values = {
        "out": str(folder / "run"), "model": str(tiny_policy(folder / "policy")), "updates": 2,
        "eval_problems": 2, "eval_samples": 1, "eval_every": 0, "threads": torch.get_num_threads(), "sampling": {"max_tokens": 4}, "eval_sampling": {"max_tokens": 4}, "sketch": {"rank": 4},
        "task": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2}}, "kl": {"schedule": "none"},
        "ppo": {"prompts_per_update": 6, "microbatch": 4},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(values))
    Trainer(load_config(folder / "recipe.json")).run()
    return folder / "recipe.json", folder / "run" / "checkpoint"


def test_gradients_are_those_whose_sketch_the_trainer_sees(recipe):
    cfg = load_config(recipe[0])
    model, tokenizer, update, baseline = load_stage(cfg, recipe[1])
    assert update == 2
    rollouts, rewards = sample(model, tokenizer, cfg, update)
    found = policy_gradients(model, tokenizer, cfg, rollouts, rewards - 0.5)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    logra = LoGRA(model, cfg.sketch)
    padded = rollouts.padded(tokenizer.pad_token_id)
    logp = sequence_logprobs(model, padded)
    ppo_loss(logp, padded["rollout_logprobs"], rewards - 0.5, padded["response_mask"], rollouts.tokens)[0].backward()
    for name, target in logra.targets.items():
        expected = found[name] @ target.projection().T
        assert torch.allclose(target.sketch.grad, expected, rtol=1e-3, atol=1e-5 * float(expected.norm())), name


def test_the_command_records_and_goes_on_where_it_was_stopped(recipe, tmp_path):
    out = tmp_path / "study.jsonl"
    arguments = [str(recipe[0]), "--checkpoint", str(recipe[1]), "--out", str(out), "--every", "1", "--batches", "2"]
    assert main(arguments) == 0
    header, rows = read_log(out)
    layers = {r["layer"] for r in rows if r["kind"] == "gradient"}
    assert len(layers) == 21 and header["settings"]["batches"] == 2
    kinds = [(r["stage"], r["advantages"], r["batch"]) for r in rows if r["kind"] == "gradient" and r["layer"] == min(layers)]
    assert len(kinds) == len(set(kinds)) == 6  # two stages x (two batches of verified rewards, one of random advantages)
    lines = out.read_text().splitlines(keepends=True)
    done = [i for i, line in enumerate(lines) if '"layer_done"' in line]
    out.write_text("".join(lines[: done[11] + 4]))  # killed within the thirteenth layer
    assert main(arguments) == 0
    assert read_log(out)[1] == rows
    with pytest.raises(ConfigError, match="other settings"):
        main([*arguments[:-1], "3"])


def test_a_missing_checkpoint_is_named(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="logra_core.rl.train"):
        load_stage(load_config(recipe[0]), tmp_path / "none")
