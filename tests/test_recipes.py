"""data/recipes: every file and every command named in one parses, and holds the settings that the paper publishes."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from logra_core.planning.launch import parse
from logra_core.rl.configfile import load_config
from logra_core.rl.settings import TrainConfig
from logra_core.rl.tasks import make_task

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recipes"
RECIPES = sorted(p.name for p in FOLDER.glob("*.yaml"))
MATH = [n for n in RECIPES if n.startswith("math_")]
H100 = [*MATH, "gym_27b_logra.yaml"]


def commands(name: str) -> list[TrainConfig]:
    """The configs of the commands in a recipe's comments."""
    made = []
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("#$ "):
            *launch, path = (words := shlex.split(line[3:]))[: words.index("-m") + 3]
            assert launch == ["torchrun", "--nproc-per-node", "4", "-m", "logra_core.rl.train"] and path == f"data/recipes/{name}"
            made.append(load_config(FOLDER / name, words[len(launch) + 1 :]))
    return made


def launches(name: str) -> list[tuple]:
    """What the commands of launch.py in a recipe's comments ask for."""
    words = [shlex.split(line[3:]) for line in (FOLDER / name).read_text().splitlines() if line.startswith("#> ")]
    assert all(w[:4] == ["python", "-m", "logra_core.planning.launch", f"data/recipes/{name}"] for w in words)
    return [parse([str(FOLDER / name), *w[4:]]) for w in words]


def published(cfg: TrainConfig) -> dict:
    """METHOD sections 3, 4 and 6, as they stand in a config."""
    return {
        "algorithm": (cfg.ppo.prompts_per_update, cfg.ppo.failure_reward, cfg.ppo.baseline_weight, cfg.ppo.tis_cap),
        "sampling": (cfg.sampling.temperature, cfg.sampling.top_p),
        "machine": (cfg.engine, cfg.gradient_checkpointing, cfg.compute_dtype),
        "dense": tuple(asdict(cfg.dense).values()),
        "optimizer": (cfg.optim.rule, cfg.optim.update_ratio, cfg.optim.beta2, cfg.optim.eps, cfg.optim.wire_dtype),
        "control": (cfg.kl.alpha_max, cfg.kl.probe_responses, cfg.kl.mismatch, cfg.kl.mismatch_weight, cfg.kl.mismatch_floor),
    }  # fmt: skip


PAPER = {
    "algorithm": (128, -0.01, 0.1, 2.0),
    "sampling": (1.0, 1.0),
    "machine": ("vllm", True, "bfloat16"),
    "dense": (1e-6, 0.9, 0.95, 1e-8, 0.0, 9, 300, 0.1, False),
    "optimizer": ("row_adam", 6e-5, 0.95, 1e-8, "bfloat16"),
    "control": (3.0, 8, True, 0.3, 0.5),  # 8: 2 probe responses a rank, 4 ranks
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses_and_keeps_records_in_data_runs(name):
    cfg = load_config(FOLDER / name)
    assert cfg.out.startswith("data/runs/") and cfg.sampling.top_p == 1 and cfg.kl.temperature == cfg.sampling.temperature
    assert max(len(line) for line in (FOLDER / name).read_text().splitlines() if not line.startswith(("#$ ", "#> "))) <= 150


@pytest.mark.parametrize("name", H100)
def test_published_settings_are_in_their_place_in_every_run(name):
    text, runs = (FOLDER / name).read_text(), commands(name)
    assert "# Departures" in text and "Not run by us yet" in text and runs
    assert len({cfg.out for cfg in runs}) == len(runs)  # no run overwrites another
    assert {len(cfg.engine_urls) for cfg in runs} == {4}
    for cfg in (load_config(FOLDER / name), *runs):
        other = {"logra": {"dense"}, "dense": {"optimizer", "control"}}[cfg.method]  # settings of the method that is not run
        assert {k: v for k, v in published(cfg).items() if k not in other} == {k: v for k, v in PAPER.items() if k not in other}


@pytest.mark.parametrize("name", RECIPES)
def test_one_command_starts_four_ranks_and_four_servers_on_a_gpu_each(name):
    made = launches(name)
    assert len(made) == (name not in ("chain_sum_cpu.yaml", "study_cpu.yaml"))
    for launch, seeds in made:
        assert (launch.ranks, launch.servers) == ((4, 4) if name in H100 else (2, 1))
        assert [*launch.train_devices, *launch.rollout_devices] == (list(range(8)) if name in H100 else [])
        room = launch.server_options["max_model_len"] if name in H100 else 0
        for cfg in map(launch.config, seeds):
            assert cfg.engine == "vllm" and (name not in H100 or cfg.sampling.max_tokens + 1024 == room)
        assert len(seeds) == (3 if name in H100 and any(m in name for m in ("_dense", "_logra")) and name in MATH else 1)


@pytest.mark.parametrize("name", MATH)
def test_math_runs_evaluate_as_the_paper_does(name):
    for cfg in commands(name):
        assert (cfg.task.name, cfg.task.train_data, cfg.task.eval_data) == ("math", "BytedTsinghua-SIA/DAPO-Math-17k", "HuggingFaceH4/MATH-500")
        assert (cfg.eval_problems, cfg.eval_samples, cfg.eval_every) == (500, 4, 5)
        assert (cfg.eval_sampling.temperature, cfg.eval_sampling.top_p) == (0.7, 0.7)
        assert cfg.sampling.max_tokens + 1024 == 4096 and cfg.updates == (800 if "_kl" in name else 300)


@pytest.mark.parametrize("method", ["logra", "dense"])
@pytest.mark.parametrize(("size", "model"), [("1.5b", "Qwen/Qwen2.5-Math-1.5B"), ("7b", "Qwen/Qwen2.5-7B")])
def test_the_main_comparison_has_three_seeds(size, model, method):
    runs = commands(f"math_{size}_{method}.yaml")
    assert [cfg.seed for cfg in runs] == [0, 1, 2] and {(cfg.method, cfg.model) for cfg in runs} == {(method, model)}
    for cfg in runs:
        assert (cfg.kl.schedule, cfg.kl.budget, cfg.kl.budget_end, cfg.kl.horizon, cfg.kl.estimator) == ("cosine", 2e-4, 2e-5, 300, "jvp")
        assert (cfg.sketch.rank, cfg.sketch.distribution, cfg.sketch.refresh) == (256, "rademacher", True)


def test_the_ablations_have_the_papers_cells():
    ranks = commands("math_1.5b_rank.yaml")
    assert [(c.sketch.rank, c.sketch.distribution, c.sketch.refresh) for c in ranks] == [
        *((r, "rademacher", True) for r in (4, 16, 64, 256)), (256, "rademacher", False), (256, "gaussian", True),
    ]  # fmt: skip
    budgets = commands("math_1.5b_kl.yaml")
    cells = [("none", None), ("constant", 1.5e-3), ("constant", 1.5e-4), ("cosine", 2e-4)]
    assert [(c.kl.schedule, None if c.kl.schedule == "none" else c.kl.budget) for c in budgets] == [cell for cell in cells for _ in range(2)]
    assert [c.seed for c in budgets] == [0, 1] * 4


def test_the_27b_run_probes_by_finite_difference_on_a_mixture_that_exists():
    cfg = load_config(FOLDER / "gym_27b_logra.yaml")
    assert (cfg.kl.estimator, cfg.sampling.max_tokens, cfg.eval_problems, cfg.updates) == ("finite_difference", 16384, 193, 1100)
    task = make_task(replace(cfg.task, grader_workers=2))  # checks names, options and oracles
    try:
        assert len(task.parts) == 8 and {p.meta["dataset"] for p in task.heldout(16)} == set(task.parts)
    finally:
        task.close()
