"""preflight.py: each check finds what is missing and names it; memory is that of the planner and of the shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from logra_core import ConfigError
from logra_core.planning import preflight
from logra_core.planning.launch import LaunchConfig
from logra_core.planning.planner import H100
from logra_core.planning.shapes import linear_shapes, parameters

RECIPES = Path(__file__).resolve().parents[1] / "data" / "recipes"
GPUS = {"ranks": 4, "servers": 4, "train_devices": [0, 1, 2, 3], "rollout_devices": [4, 5, 6, 7]}


@pytest.fixture
def node(monkeypatch):
    """As on a node of eight 80 GB GPUs: what torch and psutil report of it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(preflight, "_capacity", lambda device: int(H100))
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("M", (), {"available": 10**12}))


def checks(recipe: str, overrides=(), shape="", **settings) -> dict[str, preflight.Check]:
    launch = LaunchConfig(str(RECIPES / recipe), tuple(overrides), **settings)
    return {c.what: c for c in preflight.preflight(launch, shape=shape)}


def test_the_cpu_runs_are_possible_where_the_tests_run():
    for recipe in ("ci_math.yaml", "ci_gym.yaml"):
        found = checks(recipe)
        assert [c.what for c in found.values() if not c.ok] == [], "\n".join(map(str, found.values()))
    assert "generated from seeds: countdown, " in found["data"].detail


def test_gpus_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert preflight.devices(LaunchConfig("x.yaml", **GPUS)) == preflight.Check("devices", False, "4 GPUs train, 4 generate, 5 are there; missing: 5, 6, 7")


def test_data_and_models_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cfg = LaunchConfig(str(RECIPES / "math_7b_logra.yaml")).config(0)
    for check, name in ((preflight.data(cfg), "BytedTsinghua-SIA/DAPO-Math-17k"), (preflight.model(cfg), "Qwen/Qwen2.5-7B")):
        assert not check.ok and f"{name} is not in the hub's cache, and HF_HUB_OFFLINE forbids fetching it" in check.detail
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert preflight.data(cfg).ok and preflight.data(cfg).detail.count("it will be fetched") == 2
    (tmp_path / "models--Qwen--Qwen2.5-7B").mkdir()
    assert preflight.model(cfg).detail == "Qwen/Qwen2.5-7B is in the hub's cache"
    cfg = LaunchConfig(str(RECIPES / "gym_27b_logra.yaml")).config(0)
    assert str(preflight.model(cfg)) == "FAIL model: YOUR_27B_MODEL is neither a path that exists nor a hub id (owner/name)"
    with pytest.raises(ConfigError, match="no shape is known for model 'YOUR_27B_MODEL': name one of SmolLM2-135M"):
        preflight.shape_of(cfg.model)


def test_other_versions_than_the_pins_are_named(monkeypatch):
    assert preflight.versions(True).ok
    monkeypatch.setattr(preflight, "_version", {"torch": "2.12.0", "transformers": "5.19.0", "vllm": None}.get)
    assert preflight.versions(True) == preflight.Check(
        "versions", False, "torch 2.12.0 (needs 2.13.0), transformers 5.19.0, vllm not installed (needs 0.32.0)"
    )
    assert preflight.versions(False).detail == "torch 2.12.0 (needs 2.13.0), transformers 5.19.0"


def test_disk_has_room_for_two_checkpoints(monkeypatch, tmp_path):
    cfg = LaunchConfig(str(RECIPES / "ci_math.yaml"), (f"out={tmp_path}/a/b",)).config(0)
    layers = linear_shapes("SmolLM2-135M").values()
    needed = 12 * sum(d * k for d, k in layers) + 8 * sum(d for d, _ in layers)
    for free, ok in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("D", (), {"free": free if path == tmp_path else -1}))
        assert preflight.disk(cfg, "SmolLM2-135M").ok == ok


def test_disk_counts_the_mean_of_the_sketches(monkeypatch):
    """A checkpoint is two of: rank numbers a row more, where there is a first moment."""
    layers, momentum = linear_shapes("SmolLM2-135M"), ("optim.beta1=0.9", "sketch.refresh_every=5")
    ranks = {n: 4 if n.endswith("q_proj") else 2 for n in layers}
    more = 2 * 4 * sum(ranks[n] * d for n, (d, _) in layers.items())
    given = ("sketch.rank=2", "sketch.ranks={q_proj: 4}")
    without, with_it = (LaunchConfig(str(RECIPES / "ci_math.yaml"), (*given, *o)).config(0) for o in ((), momentum))
    assert preflight.disk_bytes(with_it, "SmolLM2-135M") - preflight.disk_bytes(without, "SmolLM2-135M") == more


def test_every_estimator_of_the_kl_is_planned(node):
    peaks = {}
    for estimator in ("jvp", "score_sketch"):
        peaks[estimator] = checks("math_1.5b_logra.yaml", [f"kl.estimator={estimator}"], kv_cache_gib=40.0, **GPUS)["memory, training"]
    assert all(c.ok for c in peaks.values())


@pytest.mark.parametrize(("recipe", "kv"), [("math_1.5b_logra.yaml", 40.0), ("math_7b_logra.yaml", 8.0), ("math_7b_dense.yaml", 8.0)])
def test_the_math_recipes_fit_on_the_papers_node(node, recipe, kv):
    found = checks(recipe, kv_cache_gib=kv, **GPUS)
    assert found["memory, training"].ok and found["memory, server"].ok and found["memory, host"].ok, "\n".join(map(str, found.values()))
    assert "fits" in found["memory, training"].detail and "largest term" in found["memory, training"].detail


def test_of_the_27b_run_training_fits_and_a_server_does_not(node):
    """The masters that the rollout backend keeps for exactness are too large for one 80 GB GPU."""
    found = checks("gym_27b_logra.yaml", shape="27B (assumed)", **GPUS)
    assert found["memory, training"].ok and not found["memory, server"].ok and not found["model"].ok
    rounded = ["optim.stochastic_rounding=true", "compute_dtype=bfloat16"]
    found = checks("gym_27b_logra.yaml", rounded, "27B (assumed)", **GPUS)
    assert found["memory, server"].ok and "no masters" in found["memory, server"].detail and found["memory, training"].ok
    assert "while an update commits in 4 servers" in found["memory, host"].detail
    unchunked = checks("gym_27b_logra.yaml", ["ppo.logit_chunk=0"], shape="27B (assumed)", **GPUS)["memory, training"]
    assert not unchunked.ok and "does not fit" in unchunked.detail and "largest term: logits" in unchunked.detail
    launch = LaunchConfig(str(RECIPES / "gym_27b_logra.yaml"), **GPUS)
    targets = sum(d * k for d, k in linear_shapes("27B (assumed)").values())
    assert preflight.server_bytes(launch, launch.config(0), "27B (assumed)") == 2 * parameters("27B (assumed)") + 8 * targets + 5 * 2**30
