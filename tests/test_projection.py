"""One seed recipe: right distribution, the same bits for every shard, device and thread count, other bits for other layers."""

import hashlib
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
import torch

from logra_core import ConfigError, ProjectionSpec, make_projection
from logra_core.projection import Projection, canonical_name, projection_digest, stream_of
from logra_core.settings import DISTRIBUTIONS
from logra_core.variants.activation import random_signs
from logra_core.variants.inputs import input_name
from logra_core.variants.rows import _log, normal

NAME = "model.layers.3.self_attn.q_proj"


def sha(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


# Digests of A written down once: a changed recipe would silently disagree with every recorded run and every older replica.
KNOWN = {
    "rademacher": "7ca44a9dd23c7179265620b737a798571d84e71ae50fdc9a9d84236ae88934ae",
    "gaussian": "82fc92ae39d3601d582746b6f3a2fc1fb8a3c65f4fcde0d23a9069161f809399",
    "orthonormal": "72349e48f699a364f6b4d6f3472d13263a493b02fe7b3973cd701cd2883f0791",
    "hadamard": "ed01d11964a456e26bc5a0a324a6ce2afb182f1b6c90543353518cac889107ad",
    "coordinates": "1c95e939afc4af9dea75f7b264156e2e0046a0ee8f86004c398b9d63e9d72490",
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_known_bits(distribution):
    assert sha(make_projection(ProjectionSpec(7, 3, 16, distribution), NAME, 100)) == KNOWN[distribution]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_expectation_of_AtA_is_identity(distribution):
    """E[AᵀA] = I to within five standard errors of the mean over 400 draws."""
    rank, width, draws = 8, 24, 400
    samples = torch.stack([(A := make_projection(ProjectionSpec(0, d, rank, distribution), NAME, width).double()).T @ A for d in range(draws)])
    error = samples.std(0) / draws**0.5
    assert ((samples.mean(0) - torch.eye(width)).abs() <= 5 * error + 1e-6).all()  # Rademacher's diagonal has no spread


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("width", [1, 7, 64, 65, 576])
def test_columns_equal_slice_of_whole(distribution, width):
    spec = ProjectionSpec(1, 0, min(5, width), distribution)
    whole = make_projection(spec, NAME, width)
    for start in range(0, width, max(1, width // 5)):
        for stop in (start, start + 1, start + 9, width):
            assert torch.equal(make_projection(spec, NAME, width, columns=slice(start, stop)), whole[:, start:stop])


def test_layers_draws_and_seeds_differ():
    made = [make_projection(ProjectionSpec(s, d, 64, "rademacher"), n, 576) for s in (0, 1) for d in (0, 1) for n in ("a.q", "b.q")]
    for i, A in enumerate(made):
        for B in made[:i]:
            correlation = float((A * B).sum() / (A.norm() * B.norm()))
            assert abs(correlation) < 5 / (64 * 576) ** 0.5  # five standard deviations of independent signs


def test_wrapped_names_give_the_same_matrix():
    wrapped = "module._orig_mod.model.layers.3._checkpoint_wrapped_module.self_attn._fsdp_wrapped_module.q_proj"
    assert canonical_name(wrapped) == NAME
    spec = ProjectionSpec(0, 0, 4, "rademacher")
    assert torch.equal(make_projection(spec, wrapped, 50), make_projection(spec, NAME, 50))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_thread_count_does_not_matter(distribution):
    """Another process with other thread settings draws the same bits, large enough for BLAS to use threads."""
    code = f"""
import hashlib, sys, torch
import logra_core.variants
from logra_core import ProjectionSpec, make_projection
A = make_projection(ProjectionSpec(5, 2, 96, {distribution!r}), "x.down_proj", 1536)
print(hashlib.sha256(A.numpy().tobytes()).hexdigest())
"""
    import os

    def run(threads):
        env = os.environ | {f"{n}_NUM_THREADS": str(threads) for n in ("OMP", "MKL", "OPENBLAS")}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert run(1) == run(2) != ""


def test_bits_unpack_to_signs_as_numpy_unpacks_them():
    packed = np.random.default_rng(0).integers(0, 256, (6, 24), dtype=np.uint8)
    made = Projection(ProjectionSpec(0, 0, 6, "rademacher"), NAME, 190).unpacked(torch.from_numpy(packed))
    assert np.array_equal((made > 0).numpy(), np.unpackbits(packed, axis=1, bitorder="little", count=190).astype(bool))
    assert set(made.abs().unique().tolist()) == {float(torch.tensor(6**-0.5))}


def test_orthonormal_rows():
    """A Aᵀ = (k/r) I; measured 1.2e-8 at r = k = 576, where fp32 rounding of the entries alone gives about 1e-8."""
    for rank, width in ((1, 1), (64, 576), (576, 576), (4, 8960)):
        A = make_projection(ProjectionSpec(0, 0, rank, "orthonormal"), NAME, width).double()
        assert (A @ A.T * rank / width - torch.eye(rank)).abs().max() < 5e-8


def test_coordinates_choose_columns_without_repetition():
    for rank, width in ((1, 1), (5, 48), (48, 48)):
        A = make_projection(ProjectionSpec(0, 0, rank, "coordinates"), NAME, width)
        where = A.argmax(1)
        assert len(set(where.tolist())) == rank and torch.equal(A, torch.eye(width)[where] * (width / rank) ** 0.5)
        G = torch.randn(9, width)
        assert torch.equal(G @ A.T, G[:, where] * A.max())
    first = [make_projection(ProjectionSpec(0, d, 1, "coordinates"), NAME, 48).argmax().item() for d in range(4)]
    assert len(set(first)) > 1  # another draw, another choice


def test_hadamard_rows_against_the_doubling_construction():
    """The same choice of rows and columns from H = [[H, H], [H, −H]], made by doubling, with the same signs; orthonormal at powers of two."""
    for rank, width in ((1, 1), (3, 3), (16, 64), (64, 64), (40, 48)):
        spec, H = ProjectionSpec(0, 0, rank, "hadamard"), torch.ones(1, 1)
        while len(H) < width:
            H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
        stream = stream_of(spec, NAME)
        sign_K = torch.tensor([1.0 - 2.0 * (int(word) & 1) for word in stream.random_raw(width)])
        rows, columns = (sorted(range(len(H)), key=stream.random_raw(len(H)).tolist().__getitem__) for _ in range(2))
        A = make_projection(spec, NAME, width)
        assert torch.equal(A, (H[rows[:rank]][:, columns[:width]] * sign_K).double().div(rank**0.5).float())
        if len(H) == width:
            assert torch.allclose(A @ A.T, width / rank * torch.eye(rank), atol=1e-5)
    A = make_projection(ProjectionSpec(0, 0, 256, "hadamard"), NAME, 576).double() * 256**0.5
    overlap = (A @ A.T - 576 * torch.eye(256)).square().sum() / (256 * 255) / 576
    assert 0.4 < float(overlap) < 0.48  # 1 − 576/1024 = 0.44; random signs give 1


def test_shared_specs_give_layers_with_one_input_one_matrix():
    spec = ProjectionSpec(0, 0, 4, "rademacher")

    def shared(name):
        return make_projection(spec, input_name(name), 64)

    block = "model.layers.3."
    q, k, v, o = (shared(f"{block}self_attn.{n}_proj") for n in "qkvo")
    gate, up, down = (shared(f"{block}mlp.{n}_proj") for n in ("gate", "up", "down"))
    assert torch.equal(q, k) and torch.equal(q, v) and torch.equal(gate, up)
    assert not torch.equal(q, o) and not torch.equal(gate, down) and not torch.equal(q, gate)
    assert not torch.equal(q, shared("model.layers.4.self_attn.q_proj"))
    assert torch.equal(o, make_projection(spec, f"{block}self_attn.o_proj", 64))
    assert not torch.equal(q, make_projection(spec, f"{block}self_attn.q_proj", 64))


def test_random_signs_continue_in_the_same_stream():
    spec = ProjectionSpec(0, 0, 4, "rademacher")
    whole, stream = random_signs(stream_of(spec, "x"), 20, 70), stream_of(spec, "x")
    assert torch.equal(torch.cat([random_signs(stream, n, 70) for n in (3, 0, 16, 1)]), whole)
    assert set(whole.unique().tolist()) == {-1.0, 1.0} and abs(float(whole.mean())) < 5 / (20 * 70) ** 0.5


def test_normal_quantiles_against_the_standard_library():
    class Words:
        def random_raw(self, count):
            return words

    # centre, tails, and the far tail below 1.4e-11 that random words would hardly reach
    words = np.concatenate([np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64), np.uint64(1) << np.arange(11, 64, dtype=np.uint64),
                            ~(np.uint64(1) << np.arange(11, 64, dtype=np.uint64)), np.array([0, 2**64 - 1], dtype=np.uint64)])  # fmt: skip
    uniform = ((words >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53
    expected = [NormalDist().inv_cdf(u) for u in uniform if u < 1]
    ours = normal(Words(), len(words))[uniform < 1]
    assert np.allclose(ours, expected, rtol=4e-15, atol=4e-15)
    assert np.isfinite(normal(Words(), len(words))).all()
    x = np.random.default_rng(1).random(1000) * 0.1 + 1e-18
    assert np.allclose(_log(x), np.log(x), rtol=1e-15, atol=0)


def test_digest_sees_every_layer_and_bit():
    def two(distribution, draw=0, flip=False):
        made = {n: Projection(ProjectionSpec(0, draw, 4, distribution), n, 10) for n in "ab"}
        if flip and made["b"].signs:
            made["b"].bits[3, 1] ^= 2
            assert int((made["b"].matrix() != Projection(made["b"].spec, "b", 10).matrix()).sum()) == 1
        elif flip:
            changed = made["b"].matrix()
            changed[3, 9] *= -1
            made["b"].digest(changed)
        return projection_digest(made)

    for distribution in DISTRIBUTIONS:
        digest = two(distribution)
        assert digest == two(distribution) and len({digest, two(distribution, 1), two(distribution, 0, True)}) == 3


@pytest.mark.parametrize(
    "bad, word",
    [
        (lambda: ProjectionSpec(0, 0, 0, "rademacher"), "rank"),
        (lambda: ProjectionSpec(-1, 0, 1, "rademacher"), "seed"),
        (lambda: ProjectionSpec(0, 0, 1, "cauchy"), "cauchy"),
        (lambda: make_projection(ProjectionSpec(0, 0, 8, "orthonormal"), NAME, 7), "rank"),
        (lambda: make_projection(ProjectionSpec(0, 0, 8, "hadamard"), NAME, 7), "rank"),
        (lambda: make_projection(ProjectionSpec(0, 0, 8, "coordinates"), NAME, 7), "rank"),
        (lambda: make_projection(ProjectionSpec(0, 0, 8, "gaussian"), NAME, 0), "width"),
        (lambda: make_projection(ProjectionSpec(0, 0, 8, "gaussian"), NAME, 9, columns=slice(0, 9, 2)), "columns"),
    ],
)
def test_bad_input_is_named(bad, word):
    with pytest.raises(ConfigError, match=word):
        bad()
