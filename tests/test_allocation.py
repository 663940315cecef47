"""Ranks by name, and the allocation of a byte budget against all allocations there are."""

import dataclasses
import itertools
import random

import pytest
import torch
from models import policy_loss, random_ids, score, tiny_llama

from logra_core import ConfigError, LoGRA, OptimConfig, Replica, SketchConfig, SketchUpdate, SyncError, target_table
from logra_core.sketch import select_targets
from logra_core.variants.allocation import allocate_ranks, layer_ranks
from logra_core.variants.two_sided import accumulated, sizes

NAMES = [f"model.layers.{i}.{n}" for i in (0, 1, 10) for n in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
RANKS = {"down_proj": 7, "layers.1": 2, "layers.2.self_attn.k_proj": 1}


def test_patterns_are_whole_parts_and_the_longest_counts():
    made = layer_ranks(SketchConfig(rank=32, ranks={"down_proj": 64, "layers.0.": 16, "layers.1.mlp.up_proj": 3}), NAMES)
    assert list(made) == NAMES and list(made.values()) == [16, 16, 16, 32, 3, 64, 32, 32, 64]
    assert layer_ranks(SketchConfig(rank=5), NAMES) == dict.fromkeys(NAMES, 5)
    assert layer_ranks(SketchConfig(ranks={"mlp": 4, "up_proj": 4}), NAMES)[NAMES[1]] == 4  # no contradiction


def test_bad_patterns_are_named():
    with pytest.raises(ConfigError, match=r"'layers.2' matches no sketched layer.*'proj' matches no"):
        layer_ranks(SketchConfig(ranks={"proj": 4, "layers.2": 5, "mlp": 3}), NAMES)
    with pytest.raises(ConfigError, match="'mlp', 'up_proj' give 'model.layers.0.mlp.up_proj' different ranks"):
        layer_ranks(SketchConfig(ranks={"mlp": 4, "up_proj": 5}), NAMES)
    for bad in ({"mlp": 0}, {"mlp": 1.5}, {"mlp": True}, {"": 4}, {".": 4}, {3: 4}):
        with pytest.raises(ConfigError, match="ranks"):
            SketchConfig(ranks=bad)
    with pytest.raises(ConfigError, match="share one input, so they need the same rank"):
        LoGRA(tiny_llama(), SketchConfig(rank=4, share_inputs=True, ranks={"q_proj": 3}))
    with pytest.raises(ConfigError, match="rank = 40: orthonormal rows need rank <= inputs, but 'model.layers.0.self_attn.q_proj' has 32"):
        LoGRA(tiny_llama(), SketchConfig(rank=4, distribution="orthonormal", ranks={"q_proj": 40}))


@pytest.mark.parametrize("sketch", [{}, {"kind": "two_sided"}, {"projection": "activation", "drop_leading": 1}, {"distribution": "orthonormal"}])
def test_each_layer_has_its_rank_in_training_message_and_replica(sketch):
    config = SketchConfig(rank=4, ranks=RANKS, **sketch)
    logra, replica, ids = LoGRA(tiny_llama(), config, OptimConfig(update_ratio=1e-3)), Replica(tiny_llama(), config.targets), random_ids(3, 10, 96)
    expected = layer_ranks(config, logra.targets)
    for t in range(3):
        score(logra, ids)
        policy_loss(logra.model, ids, t).backward()
        sent = logra.apply(logra.propose())
        for name, target in logra.targets.items():
            d, k = target.weight.shape
            assert target.sketch.numel() == accumulated(dataclasses.replace(config, rank=expected[name]), d, k)
            rank = sizes(dataclasses.replace(config, rank=expected[name]), d, k)[0] if config.kind == "two_sided" else expected[name]
            assert sent.factors[name].shape == (d, rank) and sent.basis(name).shape == (rank, k)
        data = sent.to_bytes(logra.weights.fingerprint())
        read = SketchUpdate.from_bytes(data)
        assert read.ranks == sent.ranks and bool(read.ranks) == (not sent.bases)
        assert torch.equal(dataclasses.replace(sent, drawn={}).basis(NAMES[5]), sent.basis(NAMES[5]))  # drawn anew at its rank
        replica.apply(data)
        assert replica.fingerprint() == logra.weights.fingerprint()
    again = LoGRA(tiny_llama(), config, OptimConfig(update_ratio=1e-3))
    again.load_state_dict(logra.state_dict())
    assert {n: t.spec for n, t in again.targets.items()} == {n: t.spec for n, t in logra.targets.items()}
    total = sum(t.sketch.numel() for t in logra.targets.values())
    kinds = target_table(logra.targets).splitlines()[1:]
    assert [int(line.split()[-1].replace(",", "")) for line in kinds][-1] == total == sum(int(line.split()[-1].replace(",", "")) for line in kinds[:-1])
    with pytest.raises(ConfigError, match="does not fit"):
        LoGRA(tiny_llama(), dataclasses.replace(config, ranks=RANKS | {"down_proj": 6})).load_state_dict(logra.state_dict())


def test_a_message_with_other_ranks_is_refused():
    config, ids = SketchConfig(rank=4, ranks=RANKS), random_ids(3, 10, 96)
    logra, replica = LoGRA(tiny_llama(), config), Replica(tiny_llama(), config.targets)
    policy_loss(logra.model, ids).backward()
    wire, before = logra.apply(logra.propose()), replica.fingerprint()
    for ranks in ({}, wire.ranks | {NAMES[5]: 6}):
        with pytest.raises(SyncError, match="factor of the wrong shape"):
            replica.apply(dataclasses.replace(wire, ranks=ranks, drawn={}).to_bytes())
    with pytest.raises(SyncError, match="malformed"):
        replica.apply(dataclasses.replace(wire, ranks=wire.ranks | {NAMES[5]: 0}).to_bytes())
    assert replica.fingerprint() == before and replica.version == 0


def kept(energy, ranks):
    return sum(sum(energy[n][:r]) for n, r in ranks.items())


def spent(shapes, ranks):
    return sum(4 * shapes[n][0] * r for n, r in ranks.items())


def every_allocation(energy, shapes, total):
    for ranks in itertools.product(*(range(1, len(e) + 1) for e in energy.values())):
        made = dict(zip(energy, ranks, strict=True))
        if spent(shapes, made) <= total:
            yield made


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("equal", [True, False])
def test_allocation_against_all_allocations(seed, equal):
    draw = random.Random(seed)
    shapes = {n: (6 if equal else draw.choice([2, 5, 9]), draw.choice([3, 4, 8])) for n in "abcd"}
    energy = {n: sorted((draw.random() ** 3 for _ in range(min(shape))), reverse=True) for n, shape in shapes.items()}
    least = spent(shapes, dict.fromkeys(shapes, 1))
    for total in (least, least + 30, 2 * least, 3 * least, 100 * least):
        ranks = allocate_ranks(energy, shapes, total)
        best = max(kept(energy, r) for r in every_allocation(energy, shapes, total))
        assert spent(shapes, ranks) <= total and all(1 <= ranks[n] <= min(shapes[n]) for n in shapes)
        slack = 0.0 if equal or total in (least, 100 * least) else max(e[1] for e in energy.values())
        assert best - slack - 1e-12 <= kept(energy, ranks) <= best + 1e-12


def test_allocation_goes_where_the_energy_is():
    shapes = {"a": (10, 8), "b": (10, 8), "c": (20, 8)}
    energy = {"a": torch.tensor([9.0, 8.0, 7.0, 6.0]), "b": [9.0, 0.1, 0.1, 0.0], "c": [9.0, 8.0, 7.0, 6.0]}
    assert allocate_ranks(energy, shapes, 4 * (3 * 10 + 10 + 20)) == {"a": 3, "b": 1, "c": 1}
    assert allocate_ranks(energy, shapes, 10**6) == {"a": 4, "b": 3, "c": 4}  # nothing for what holds nothing
    assert allocate_ranks(energy, shapes, 100, cost=lambda d, k: 25 if d == 10 else 10) == {"a": 1, "b": 1, "c": 4}  # the cheaper ones


def test_layers_of_one_input_get_one_rank():
    names = ["l.0.q_proj", "l.0.k_proj", "l.0.o_proj"]
    shapes = dict.fromkeys(names, (4, 6))
    energy = {names[0]: [9.0, 5.0, 4.0], names[1]: [1.0, 0.0, 0.0], names[2]: [3.0, 3.0, 3.0]}
    ranks = allocate_ranks(energy, shapes, 16 * 5, shared=True)
    assert ranks[names[0]] == ranks[names[1]] and ranks == {names[0]: 1, names[1]: 1, names[2]: 3}
    assert allocate_ranks(energy, shapes, 16 * 5) == {names[0]: 3, names[1]: 1, names[2]: 1}


def test_what_is_refused():
    shapes = {"a": (10, 8)}
    for energy in ({"a": []}, {"a": [1.0, 2.0]}, {"a": [1.0, -1.0]}, {"a": [float("nan")]}, {"a": [float("inf"), 1.0]}):
        with pytest.raises(ConfigError, match="energy of 'a'"):
            allocate_ranks(energy, shapes, 1000)
    with pytest.raises(ConfigError, match="total_bytes = 39: rank 1 for all 1 layers takes 40"):
        allocate_ranks({"a": [1.0]}, shapes, 39)
    with pytest.raises(ConfigError, match="differ in b"):
        allocate_ranks({"a": [1.0], "b": [1.0]}, shapes, 1000)


def test_allocated_ranks_train():
    model, ids = tiny_llama(), random_ids(3, 10, 96)
    names = select_targets(model, SketchConfig().targets)
    policy_loss(model, ids).backward()
    gradients = {n: model.get_submodule(n).weight.grad for n in names}
    ranks = allocate_ranks({n: torch.linalg.svdvals(G).square() for n, G in gradients.items()}, {n: G.shape for n, G in gradients.items()}, 30000)
    logra = LoGRA(model, SketchConfig(rank=1, ranks=ranks))
    assert sum(4 * t.sketch.numel() for t in logra.targets.values()) <= 30000 and len({*ranks.values()}) > 2
    policy_loss(model, ids).backward()
    assert {n: t.sketch.grad.shape[1] for n, t in logra.targets.items()} == ranks
