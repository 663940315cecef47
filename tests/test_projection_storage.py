"""A kept as bits: the same bits as stored in fp32, in every place that reads A, and the bytes that it saves."""

import gc

import numpy as np
import pytest
import torch
from models import drawn, policy_loss, probe_batch, random_ids, tiny_llama

from logra_core import ConfigError, LoGRA, ProjectionSpec, Replica, exact_kl, predict_q
from logra_core.planning.memory import TrackMemory
from logra_core.projection import Projection, sign_bytes, stream_of
from logra_core.variants import KLConfig, OptimConfig, SketchConfig
from logra_core.variants.inputs import STORAGES

NAME = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize("width", [1, 7, 8, 63, 64, 65, 576, 1536])
@pytest.mark.parametrize("rank", [1, 3, 64])
def test_packed_bits_unpack_to_the_stored_matrix(rank, width):
    spec = ProjectionSpec(7, 3, rank, "rademacher")
    made = Projection(spec, NAME, width)
    up = np.unpackbits(sign_bytes(stream_of(spec, NAME), rank, width), axis=1, bitorder="little", count=width)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        A_RK = made.matrix(dtype)
        assert A_RK.is_contiguous() and torch.equal(A_RK, torch.from_numpy(np.where(up, 1, -1) / np.sqrt(rank)).float().to(dtype))
    assert made.bits.nbytes == rank * 8 * -(-width // 64)


def run(storage: str, distribution: str = "rademacher", steps: int = 3, dtype: torch.dtype = torch.float32):
    """Weights, q, exact KL and messages of some steps, with checkpointing on (the recomputed forward draws A once more)."""
    model, ids = tiny_llama().to(dtype), random_ids(2, 12, 96)
    logra = LoGRA(model, SketchConfig(rank=8, distribution=distribution, projection_storage=storage), OptimConfig(update_ratio=1e-2))
    logra.param_groups[0]["logra"]["run_id"] = "run"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    probe, found = probe_batch(ids, 4), []
    for step in range(steps):
        model.train()
        policy_loss(model, ids, step).backward()
        update = logra.propose()
        found.append((predict_q(model, update, probe, KLConfig()), exact_kl(model, update, probe, 0.5)))
        wire = logra.apply(update, 0.5)
        found.append(wire.to_bytes(logra.weights.fingerprint()))
    return found, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("storage", "distribution"), [("bits", "rademacher")])
def test_training_is_the_same_to_the_bit(storage, distribution, dtype):
    (kept, weights), (made, others) = run("fp32", distribution, dtype=dtype), run(storage, distribution, dtype=dtype)
    assert kept == made and all(torch.equal(w, others[n]) for n, w in weights.items())
    start = tiny_llama().to(dtype)
    assert any(not torch.equal(w, others[n]) for n, w in start.named_parameters())
    replica = Replica(start, SketchConfig().targets)
    for message in made[1::2]:
        replica.apply(message)  # refused if the fingerprint differs


def test_bytes_between_and_during_the_passes():
    """Held by the targets: 4 bytes an entry, or one bit. The peak above the sketches and factors falls by as much."""
    ids, rank, held, peaks = random_ids(1, 4, 96), 48, {}, {}
    for storage in STORAGES:
        model = tiny_llama(hidden_size=128, intermediate_size=512, num_hidden_layers=6)
        logra = LoGRA(model, SketchConfig(rank=rank, projection_storage=storage))
        layers = logra.targets.values()
        entries, padded = rank * sum(t.width for t in layers), rank * sum(-(-t.width // 64) * 64 for t in layers)
        with TrackMemory() as tracked:
            policy_loss(model, ids).backward()
            update = logra.propose()
            predict_q(model, update, probe_batch(ids, 2), KLConfig(estimator="finite_difference"))
            del update
            logra._pending = None
            gc.collect()
        packed = sum(x.nbytes for t in layers for x in drawn(t).values()) if storage == "bits" else 0  # came from NumPy: not seen by the tracker
        held[storage] = tracked.live - sum(t.sketch.grad.nbytes for t in layers) + packed
        peaks[storage] = tracked.peak + packed
        logra.detach()
    assert held["fp32"] - held["bits"] == 4 * entries - padded // 8
    assert peaks["fp32"] - peaks["bits"] > 0.8 * 4 * entries  # the rest is one unpacked A at a time


def test_a_resumed_run_may_keep_its_projections_otherwise():
    model, ids = tiny_llama(), random_ids(2, 12, 96)
    logra = LoGRA(model, SketchConfig(rank=8))
    policy_loss(model, ids).backward()
    logra.step()
    other = tiny_llama()
    other.load_state_dict(model.state_dict())
    resumed = LoGRA(other, SketchConfig(rank=8, projection_storage="bits"))
    resumed.load_state_dict(logra.state_dict())
    for trained, optimizer in ((model, logra), (other, resumed)):
        policy_loss(trained, ids).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("storage", ["fp32", "bits"])
def test_layers_that_share_their_input_keep_one_matrix(storage):
    """Hidden 32, MLP 48: q, k, v hold one A of 32 columns, o one, gate and up one, down one of 48 (bits fill up words of 64)."""
    model, ids = tiny_llama(), random_ids(2, 12, 96)
    logra = LoGRA(model, SketchConfig(rank=8, share_inputs=True, projection_storage=storage))
    for _ in range(2):
        policy_loss(model, ids).backward()
        update = logra.propose()
        kept = sum({id(x): x.nbytes for t in logra.targets.values() for x in drawn(t).values()}.values())
        assert kept == 3 * 8 * {"fp32": 4 * (3 * 32 + 48), "bits": 4 * 8}[storage]
        before = {n: update.basis(n) for n in logra.targets}
        logra.apply(update)
        assert all(torch.equal(update.basis(n), A_RK) for n, A_RK in before.items())  # the update keeps its own draw
        assert not any(torch.equal(t.projection(), before[n]) for n, t in logra.targets.items())


def test_only_a_random_one_sided_matrix_need_not_be_kept():
    for storage in ("bits",):
        for other, words in (({"projection": "activation"}, "projection is activation"), ({"kind": "two_sided"}, "kind is two_sided")):
            with pytest.raises(ConfigError, match=f"projection_storage = '{storage}': allowed is fp32 where {words}"):
                SketchConfig(projection_storage=storage, **other)


def test_bits_are_for_signs_only():
    with pytest.raises(ConfigError, match="bits with rademacher only"):
        SketchConfig(distribution="gaussian", projection_storage="bits")
    with pytest.raises(ConfigError, match="fp32, bits"):
        SketchConfig(projection_storage="int8")
    with pytest.raises(ConfigError, match="only rademacher"):
        Projection(ProjectionSpec(0, 0, 4, "gaussian"), NAME, 8).bits
