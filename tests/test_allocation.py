"""Ranks by name: patterns, training, messages, replicas."""

import dataclasses

import pytest
import torch
from models import policy_loss, random_ids, score, tiny_llama
from test_sync import rewrite

from logra_core import ConfigError, LoGRA, Replica, SketchUpdate, SyncError
from logra_core.planning.shapes import target_table
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.allocation import layer_ranks
from logra_core.variants.two_sided import sizes

NAMES = [f"model.layers.{i}.{n}" for i in (0, 1, 10) for n in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
RANKS = {"down_proj": 7, "layers.1": 2, "layers.2.self_attn.k_proj": 1}


def test_patterns_are_whole_parts_and_the_longest_counts():
    made = layer_ranks(32, {"down_proj": 64, "layers.0.": 16, "layers.1.mlp.up_proj": 3}, NAMES)
    assert list(made) == NAMES and list(made.values()) == [16, 16, 16, 32, 3, 64, 32, 32, 64]
    assert layer_ranks(5, {}, NAMES) == dict.fromkeys(NAMES, 5)
    assert layer_ranks(256, {"mlp": 4, "up_proj": 4}, NAMES)[NAMES[1]] == 4  # no contradiction


def test_bad_patterns_are_named():
    with pytest.raises(ConfigError, match=r"'layers.2' matches no sketched layer.*'proj' matches no"):
        layer_ranks(256, {"proj": 4, "layers.2": 5, "mlp": 3}, NAMES)
    with pytest.raises(ConfigError, match="'mlp', 'up_proj' give 'model.layers.0.mlp.up_proj' different ranks"):
        layer_ranks(256, {"mlp": 4, "up_proj": 5}, NAMES)
    for bad in ({"mlp": 0}, {"mlp": 1.5}, {"mlp": True}, {"": 4}, {".": 4}, {3: 4}):
        with pytest.raises(ConfigError, match="ranks"):
            SketchConfig(ranks=bad)
    with pytest.raises(ConfigError, match="share one input, so they need the same rank"):
        LoGRA(tiny_llama(), SketchConfig(rank=4, share_inputs=True, ranks={"q_proj": 3}))
    with pytest.raises(ConfigError, match="rank = 40: 'model.layers.0.self_attn.q_proj' has 32 inputs, and orthonormal rows need rank <= inputs"):
        LoGRA(tiny_llama(), SketchConfig(rank=4, distribution="orthonormal", ranks={"q_proj": 40}))


@pytest.mark.parametrize("sketch", [{}, {"kind": "two_sided"}, {"projection": "activation", "drop_leading": 1}, {"distribution": "orthonormal"}])
def test_each_layer_has_its_rank_in_training_message_and_replica(sketch):
    config = SketchConfig(rank=4, ranks=RANKS, **sketch)
    logra, replica, ids = LoGRA(tiny_llama(), config, OptimConfig(update_ratio=1e-3)), Replica(tiny_llama(), config.targets), random_ids(3, 10, 96)
    expected = layer_ranks(config.rank, config.ranks, logra.targets)
    for t in range(3):
        score(logra, ids)
        policy_loss(logra.model, ids, t).backward()
        sent = logra.apply(logra.propose())
        for name, target in logra.targets.items():
            d, k = target.weight.shape
            assert target.sketch.numel() == dataclasses.replace(config, rank=expected[name]).accumulated(d, k)
            rank = sizes(expected[name], False, d, k)[0] if config.kind == "two_sided" else expected[name]
            assert sent.factors[name].shape == (d, rank) and sent.basis(name).shape == (rank, k)
        data = sent.to_bytes(logra.weights.fingerprint())
        read = SketchUpdate.from_bytes(data)
        assert {n: p.spec for n, p in read.projections.items()} == {n: p.spec for n, p in sent.projections.items()}
        assert torch.equal(read.basis(NAMES[5]), sent.basis(NAMES[5]))  # drawn anew at its rank, or sent
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
    cut = wire.factors | {NAMES[5]: wire.factors[NAMES[5]][:, :1]}  # another rank, and so another A
    with pytest.raises(SyncError, match="not the same A"):
        replica.apply(rewrite(wire.to_bytes(), None, lambda t: t | {f"U.{NAMES[5]}": cut[NAMES[5]]}))
    with pytest.raises(SyncError, match="factor of the wrong shape"):
        replica.apply(dataclasses.replace(wire, factors=cut))
    assert replica.fingerprint() == before and replica.version == 0
