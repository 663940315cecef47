"""Memory by category: what is measured is what is there, and a simulation on fake tensors counts the same bytes."""

import dataclasses

import pytest
import torch
from models import random_ids, tiny_llama

from logra_core import ConfigError
from logra_core.planning import shapes as shapes_module
from logra_core.planning.memory import COUNTED, METHODS, TrackMemory, measure_step, simulate_step, storage_bytes
from logra_core.planning.shapes import SHAPES, build, full_payload, linear_shapes, model_config, parameters, sketch_payload
from logra_core.variants import SketchConfig
from logra_core.variants.two_sided import sizes

SMALL = SHAPES["SmolLM2-135M"] | {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}  # fmt: skip


def test_tracking_counts_what_lives_and_forgets_what_is_freed():
    with TrackMemory() as tracked:
        a = torch.zeros(1000)
        b = torch.zeros(3000)
        view = a[:10]  # no storage of its own
        del b
        c = torch.zeros(500)
    assert tracked.peak == 16_000 and tracked.live == 6_000 and len(view) + len(c) == 510
    assert storage_bytes([a, view, c, None]) == 6_000


def test_state_by_category_follows_from_shapes():
    model = tiny_llama()
    ids = random_ids(2, 16, 96)
    layers = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n}
    elements, rank = sum(d * k for d, k in layers.values()), 4
    dense = measure_step(model, "dense", rank, ids)
    assert (dense.gradients, dense.projections, dense.masters) == (4 * elements, 0, 0)
    assert dense.optimizer == 8 * elements + 4 * len(layers)  # two moments, and a step count a tensor
    logra = measure_step(model, "logra", rank, ids)
    assert logra.gradients == sum(4 * d * rank for d, _ in layers.values())
    assert logra.projections == sum(4 * k * rank for _, k in layers.values())
    assert logra.optimizer == sum(4 * d for d, _ in layers.values())
    lora = measure_step(model, "lora", rank, ids)
    factors = sum(rank * (d + k) for d, k in layers.values())
    assert lora.gradients == lora.projections == 4 * factors and lora.optimizer == 8 * factors + 8 * len(layers)
    galore = measure_step(model, "galore", rank, ids)
    assert galore.projections == sum(4 * rank * min(shape) for shape in layers.values()) and galore.gradients == dense.gradients
    assert galore.optimizer == sum(8 * rank * max(shape) for shape in layers.values()) and galore.layers == dense.layers
    assert dense.weights == logra.weights == lora.weights == galore.weights == storage_bytes(model.parameters())
    for step in (dense, logra, lora, galore):
        assert step.peak >= step.weights + step.optimizer + step.layers + step.head


def test_the_sketch_keeps_less_for_backward_than_a_trained_weight():
    """Dense keeps x [N, K] of every layer; LoRA keeps it and x Aᵀ; LoGRA keeps P [N, R] alone."""
    ids, rank = random_ids(2, 32, 96), 2
    kept = {m: measure_step(tiny_llama(), m, rank, ids).layers for m in METHODS}
    assert kept["logra"] < kept["dense"] < kept["lora"]
    more = measure_step(tiny_llama(), "logra", rank + 8, ids).layers - kept["logra"]
    assert more == 4 * 64 * 8 * 7 * 3  # fp32, 64 tokens, 8 more columns, 7 targets, 3 layers


def test_the_two_sided_sketch_is_accounted():
    """It accumulates D q + p K, holds Ω and Ψ, and keeps each layer's input, once where layers share it, as a trained weight would."""
    ids, model, rank = random_ids(2, 32, 96), tiny_llama(), 4
    config = SketchConfig(kind="two_sided", rank=rank)
    shapes = [tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n]
    two, dense = (measure_step(model, m, rank, ids) for m in ("two_sided", "dense"))
    assert two.gradients == sum(4 * config.accumulated(*shape) for shape in shapes)
    assert two.projections == sum(4 * (q * k + p * d) for d, k in shapes for q, p in [sizes(config.rank, config.equal_bytes, d, k)])
    assert two.optimizer == sum(4 * d for d, _ in shapes)
    assert two.layers == dense.layers + 4 * 64 * (32 + 1)  # the first norm: a sketch makes the embeddings' output require grad


def test_measuring_leaves_the_model_usable():
    model = tiny_llama()
    names = [n for n, _ in model.named_parameters()]
    for method in METHODS:
        measure_step(model, method, 2, random_ids(1, 8, 96), checkpointing=True)
    assert [n for n, _ in model.named_parameters()] == names and not model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with pytest.raises(ConfigError, match="dense, lora, logra, two_sided, galore"):
        measure_step(model, "sgd", 2, random_ids(1, 8, 96))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", COUNTED)
def test_simulation_equals_measurement(method, checkpointing, monkeypatch):
    monkeypatch.setitem(shapes_module.SHAPES, "small", SMALL)
    model = build(model_config("small"))
    real = dataclasses.asdict(measure_step(model.eval(), method, 4, random_ids(2, 24, 96), checkpointing=checkpointing))
    fake = dataclasses.asdict(simulate_step("small", method, 4, 24, rows=2, dtype=torch.float32, checkpointing=checkpointing))
    del real["scratch"], fake["scratch"]
    if method != "lora":  # to the byte
        assert fake == real
    for name, value in real.items():  # the first layer of LoRA keeps one tensor more than the others
        assert fake[name] == pytest.approx(value, rel=0.02), name


@pytest.mark.parametrize(("method", "settings"), [("dense", {"chunk": 5}), ("logra", {"chunk": 5, "storage": "bits"}), ("logra", {"storage": "bits"})])
def test_simulation_equals_measurement_with_the_switches(method, settings, monkeypatch):
    monkeypatch.setitem(shapes_module.SHAPES, "small", SMALL | {"vocab_size": 2048})
    model, ids = build(model_config("small")), random_ids(2, 24, 96)
    real = measure_step(model.eval(), method, 40, ids, True, **settings)
    fake = simulate_step("small", method, 40, 24, rows=2, dtype=torch.float32, **settings)
    assert dataclasses.replace(real, scratch=None) == fake
    plain = measure_step(model.eval(), method, 40, ids, True)
    if "chunk" in settings:
        assert real.peak_head - real.state < 0.5 * (plain.peak_head - plain.state)
    if method == "logra":
        assert real.projections <= plain.projections / 16 and real.gradients == plain.gradients  # 32 entries of inputs fill half a word


def test_stochastic_rounding_leaves_no_masters(monkeypatch):
    """What is measured is what is there: 4 bytes a trained weight less, nothing else changes; a merge takes a layer in fp32 at a time."""
    monkeypatch.setitem(shapes_module.SHAPES, "small", SMALL)
    trained, ids = full_payload(linear_shapes("small"), 1), random_ids(2, 24, 96)
    model = build(model_config("small"), torch.bfloat16).eval()
    plain, real = (measure_step(model, "logra", 4, ids, True, stochastic=s) for s in (False, True))
    fake = simulate_step("small", "logra", 4, 24, rows=2, stochastic=True)
    assert plain.masters == 4 * trained and real.masters == 0 and real.state == plain.state - 4 * trained == fake.state
    assert real.peak == plain.peak - 4 * trained == fake.peak
    largest = max(d * k for d, k in linear_shapes("small").values())
    assert real.scratch <= plain.scratch + 24 * largest  # fp32, its products and bits; measured in one chunk
    with pytest.raises(ConfigError, match="logra, two_sided"):
        simulate_step("small", "dense", 4, 24, stochastic=True)


def test_masters_are_counted_for_bf16_weights(monkeypatch):
    monkeypatch.setitem(shapes_module.SHAPES, "small", SMALL)
    trained = full_payload(linear_shapes("small"), 1)
    logra = simulate_step("small", "logra", 4, 16)
    assert logra.masters == 4 * trained and logra.weights == 2 * parameters("small")
    dense = simulate_step("small", "dense", 4, 16)
    assert dense.masters == 4 * trained and dense.gradients == 2 * trained
    assert dense.state == pytest.approx(2 * parameters("small") + 14 * trained, rel=1e-2)  # 16 bytes a trained weight
    kept = simulate_step("small", "logra", 4, 16, backward=False)
    assert (kept.state, kept.layers, kept.head, kept.peak) == (logra.state, logra.layers, logra.head, None)


def test_published_shapes_have_their_published_sizes():
    sizes = {n: parameters(n) for n in SHAPES}
    assert sizes["SmolLM2-135M"] == 134_515_008 and sizes["Qwen2.5-Math-1.5B"] == 1_543_714_304 and sizes["Qwen2.5-7B"] == 7_615_616_512
    assert round(sizes["27B (assumed)"] / 1e9) == 27
    layers = linear_shapes("Qwen2.5-Math-1.5B")
    assert sorted({k for _, k in layers.values()}) == [1536, 8960] and len(layers) == 7 * 28
    assert sketch_payload(layers, 4) * 64 == sketch_payload(layers, 256)
    with pytest.raises(ConfigError, match="Qwen2.5-7B"):
        model_config("Qwen2.5-8B")
