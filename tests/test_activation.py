"""The activation-aware projection: its rows against float64, microbatches and padding, what it falls back to, and what is sent."""

import pytest
import torch
from models import policy_loss, random_ids, score, tiny_llama
from torch import nn

from logra_core import ConfigError, LoGRA, NonFiniteError, ProjectionSpec, Replica, SketchUpdate, make_projection
from logra_core.projection import stream_of
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.activation import RangeFinder, leading_rows, observe, random_signs

IDS = random_ids(4, 10, 96)
SPEC = ProjectionSpec(3, 2, 6, "rademacher")
NAME = "model.layers.1.mlp.up_proj"


def make(rank=4, wire_dtype="float32", **sketch):
    return LoGRA(tiny_llama(), SketchConfig(rank=rank, projection="activation", **sketch), OptimConfig(update_ratio=1e-3, wire_dtype=wire_dtype))


def inputs(tokens, width, rank=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    if rank is not None:
        return torch.randn(tokens, rank, generator=g) @ torch.randn(rank, width, generator=g)
    return torch.randn(tokens, width, generator=g) * torch.logspace(0, -3, width)


def finder(complement=0.0, width=20, dtype=torch.float32):
    return RangeFinder(SPEC, "l.0.x", width, complement, dtype)


def same_rows(A, B):
    """Largest sine of an angle between the row spaces of two matrices with orthonormal rows."""
    A, B = A.double(), B.double()
    return float(torch.linalg.matrix_norm(B - (B @ A.T) @ A, 2))


def test_rows_against_float64():
    X = inputs(50, 20)
    found = finder()
    found.add(X)
    Omega = random_signs(stream_of(SPEC, "l.0.x#range"), 50, 6).double()
    expected = torch.linalg.svd(Omega.T @ X.double(), full_matrices=False).Vh
    A = found.rows()
    assert A.shape == (6, 20) and float((A @ A.T - torch.eye(6)).abs().max()) < 1e-6
    assert same_rows(A, expected) < 1e-4
    assert set(Omega.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("complement", [0.0, 0.25, 0.5, 1.0])
def test_the_strongest_directions_and_a_share_of_random_rows_orthogonal_to_them(complement):
    X = inputs(50, 20)
    found = finder(complement)
    found.add(X)
    A = found.rows()
    lead = {0.0: 6, 0.25: 4, 0.5: 3, 1.0: 0}[complement]  # two of six rows are the ceiling of a quarter
    assert float((A @ A.T - torch.eye(6)).abs().max()) < 1e-6
    Y = random_signs(stream_of(SPEC, "l.0.x#range"), 50, 6).double().T @ X.double()
    if lead:
        assert same_rows(A[:lead], torch.linalg.svd(Y, full_matrices=False).Vh[:lead]) < 1e-4
    if lead < 6:
        G = make_projection(ProjectionSpec(3, 2, 6 - lead, "gaussian"), "l.0.x#complement", 20).double()
        G = G - G @ A[:lead].double().T @ A[:lead].double()
        assert same_rows(A[lead:], torch.linalg.qr(G.T).Q.T) < 1e-4


@pytest.mark.parametrize("complement", [0.0, 0.34, 1.0])
@pytest.mark.parametrize("drop", [1, 4])
def test_dropped_directions_are_left_out_of_all_rows(drop, complement):
    """Inputs with four outlier directions, hundreds of times the rest, as float64 finds them: in X within 1e-2, in Ω X to rounding."""
    X, outliers = inputs(50, 20, 20, seed=1) / 5, torch.linalg.qr(torch.randn(20, 4, generator=torch.Generator().manual_seed(2))).Q
    X = X + torch.randn(50, 4, generator=torch.Generator().manual_seed(3)) * torch.tensor([1e3, 7e2, 5e2, 3e2]) @ outliers.T
    found = RangeFinder(SPEC, "l.0.x", 20, complement, torch.float32, drop)
    for x in X.split(17):  # in microbatches
        found.add(x)
    A = found.rows().double()
    Y = random_signs(stream_of(SPEC, "l.0.x#range"), 50, 6 + drop).double().T @ X.double()
    V = torch.linalg.svd(Y, full_matrices=False).Vh
    lead = {0.0: 6, 0.34: 3, 1.0: 0}[complement]
    assert A.shape == (6, 20) and float((A @ A.T - torch.eye(6)).abs().max()) < 1e-6
    assert float((A @ V[:drop].T).abs().max()) < 1e-5
    if drop == 4:
        assert float((A @ torch.linalg.svd(X.double()).Vh[:4].T).abs().max()) < 1e-2
        assert not lead or same_rows(A[:lead], V[4 : 4 + lead]) < 1e-2  # in fp32 the weakest has three digits
    if lead < 6:
        G = make_projection(ProjectionSpec(3, 2, 6 - lead, "gaussian"), "l.0.x#complement", 20).double()
        known = torch.cat([V[:drop], A[:lead]])
        G = G - G @ known.T @ known
        assert same_rows(A[lead:], torch.linalg.qr(G.T).Q.T) < 1e-4


@pytest.mark.parametrize("tokens, rank", [(2, None), (40, 3), (1, None)])
def test_inputs_with_fewer_directions_than_are_dropped_leave_random_rows_orthogonal_to_them(tokens, rank):
    X = inputs(tokens, 20, rank)
    found = RangeFinder(SPEC, "l.0.x", 20, 0.0, torch.float32, 4)
    found.add(X)
    A = found.rows()
    assert A.shape == (6, 20) and float((A @ A.T - torch.eye(6)).abs().max()) < 1e-6
    assert float((X @ A.T).norm() / X.norm()) < 1e-5


def test_what_is_dropped_and_only_that_share_the_gradient():
    """Cosines squared of the directions left out, and of the rank-m projection that spans them, are those of G itself, split in two."""
    torch.manual_seed(0)
    layer, X = nn.Sequential(nn.Linear(30, 8)), inputs(40, 30) * torch.cat([torch.full((2,), 1e3), torch.ones(28)])
    (G,) = torch.autograd.grad(layer(X).square().sum(), layer[0].weight)
    share = {}
    for rank, drop in ((2, 0), (28, 2)):
        sketch = SketchConfig(rank=rank, targets=("0",), projection="activation", complement=0.0, drop_leading=drop)
        logra = LoGRA(layer, sketch, OptimConfig(wire_dtype="float32"))
        with observe(logra.targets.values()):
            layer(X)
        layer(X).square().sum().backward()
        S, A = logra.targets["0"].how.factors(logra.targets["0"].sketch.grad)
        expected = G.double() @ A.double().T
        assert float((S.double() - expected).norm() / G.norm()) < 1e-5
        share[drop] = float(S.norm() / G.norm()) ** 2
        logra.detach()
    assert share[0] + share[2] == pytest.approx(1, abs=1e-3) and share[0] > 0.99


def test_every_direction_is_reached_in_turn():
    """With a complement, the rows of successive updates span everything, though every batch has the same six-dimensional inputs."""
    X, seen = inputs(30, 20, 5), []
    for complement in (0.0, 0.34):
        rows = []
        for draw in range(12):
            found = RangeFinder(ProjectionSpec(3, draw, 5, "rademacher"), "l.0.x", 20, complement, torch.float32)
            found.add(X)
            rows.append(found.rows())
        seen.append(int(torch.linalg.matrix_rank(torch.cat(rows), rtol=1e-3)))
    assert seen == [5, 20]


def test_microbatches_and_padding_do_not_matter():
    X, mask = inputs(48, 20).view(4, 12, 20), torch.rand(4, 12, generator=torch.Generator().manual_seed(0)) > 0.3
    whole = finder()
    whole.add(X[mask])
    for split in (1, 2, 3):
        parts = finder()
        for x, m in zip(X.split(split), mask.split(split), strict=True):
            parts.add(x[m])
        assert parts.tokens == whole.tokens
        assert torch.allclose(parts._sum_RK, whole._sum_RK, atol=1e-5)
        assert same_rows(parts.rows(), leading_rows(whole._sum_RK, whole._random_rows, 0.0)) < 1e-4


@pytest.mark.parametrize("tokens, rank", [(2, None), (40, 3), (1, None)])
@pytest.mark.parametrize("complement", [0.0, 0.34])
def test_inputs_of_low_rank_leave_their_rows_to_random_ones(tokens, rank, complement):
    X = inputs(tokens, 20, rank)
    found = finder(complement)
    found.add(X)
    A = found.rows()
    kept = X.double() @ A.double().T @ A.double()
    assert float((A @ A.T - torch.eye(6)).abs().max()) < 1e-6
    assert float((kept - X).norm() / X.norm()) < 1e-4  # all of them


def test_inputs_that_are_zero_or_not_finite():
    found = finder()
    found.add(torch.zeros(5, 20))
    assert float((found.rows() @ found.rows().T - torch.eye(6)).abs().max()) < 1e-6
    found = finder()
    found.add(torch.full((5, 20), float("nan")))
    with pytest.raises(NonFiniteError, match="l.0.x"):
        found.rows()


def test_nothing_of_the_gradient_is_lost_when_the_inputs_span_less_than_the_rank():
    torch.manual_seed(0)
    model, X = nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 9)), inputs(16, 30, 5)
    (G,) = torch.autograd.grad(model(X).square().sum(), model[0].weight)
    logra = LoGRA(model, SketchConfig(rank=6, targets=("0", "2"), projection="activation", complement=0.0), OptimConfig(wire_dtype="float32"))
    with observe(logra.targets.values()):
        model(X)
    model(X).square().sum().backward()
    S, A = logra.targets["0"].how.factors(logra.targets["0"].sketch.grad)
    assert float((S @ A - G).norm() / G.norm()) < 1e-5


def test_before_any_scoring_pass_rows_are_random_and_given_by_the_seed():
    logra = make()
    for t in range(3):
        if t == 1:
            score(logra, IDS)
        policy_loss(logra.model, IDS, t).backward()
        update = logra.propose()
        assert set(update.by_value) == (set(logra.targets) if t == 1 else set())
        for name, target in logra.targets.items():
            by_seed = make_projection(ProjectionSpec(0, t, 4, "rademacher"), name, target.width)
            assert torch.equal(update.basis(name), by_seed) is (t != 1)
            assert torch.equal(update.basis(name), target.projection())
        logra.apply(update)  # the next update knows nothing of what was observed before this one


def test_the_replica_follows_and_rows_are_rounded_once():
    for wire, size in (("bfloat16", 2), ("float32", 4)):
        logra, replica = make(wire_dtype=wire), Replica(tiny_llama(), SketchConfig().targets)
        score(logra, IDS)
        policy_loss(logra.model, IDS).backward()
        proposed = logra.propose()
        sent = logra.apply(proposed)
        assert all(torch.equal(sent.basis(n), proposed.basis(n)) for n in sent.factors)  # what the sketch was made with
        data = sent.to_bytes(logra.weights.fingerprint())
        payload = sum(size * 4 * sum(t.weight.shape) for t in logra.targets.values())
        assert sent.payload_bytes() == payload <= len(data)
        replica.apply(data)
        assert replica.fingerprint() == logra.weights.fingerprint()


def test_layers_that_share_an_input_share_rows_and_send_them_once():
    logra, replica = make(share_inputs=True), Replica(tiny_llama(), SketchConfig().targets)
    score(logra, IDS)
    assert {t.how.source.finder.tokens for t in logra.targets.values()} == {40}  # q, k and v read the same input, which counts once
    policy_loss(logra.model, IDS).backward()
    sent = logra.apply(logra.propose())
    block = "model.layers.1."
    assert sent.bases[block + "self_attn.q_proj"] is sent.bases[block + "self_attn.v_proj"]
    distinct = {id(V): V for V in sent.bases.values()}
    assert len(distinct) == 3 * 4  # qkv, o, gate and up, down
    data = sent.to_bytes(logra.weights.fingerprint())
    assert sent.payload_bytes() == sum(4 * t.numel() for t in (*sent.factors.values(), *distinct.values())) <= len(data)
    read = SketchUpdate.from_bytes(data)
    assert set(read.bases) == set(sent.bases) and all(torch.equal(read.bases[n], V) for n, V in sent.bases.items())
    replica.apply(data)
    assert replica.fingerprint() == logra.weights.fingerprint()


def test_padding_does_not_count():
    counted, padded = make(), make()
    mask = torch.ones(4, 13, dtype=torch.int64)
    mask[:, :3] = 0
    ids = torch.cat([torch.zeros(4, 3, dtype=torch.int64), IDS], 1)
    with observe(counted.targets.values()):
        counted.model(input_ids=IDS)
    with observe(padded.targets.values(), mask):
        padded.model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for name in counted.targets:
        assert padded.targets[name].how.source.finder.tokens == 40
        assert same_rows(*(m.targets[name].projection() for m in (counted, padded))) < 1e-3


def test_a_shared_prefix_counts_once_with_the_weight_of_its_rows():
    whole, parts = make(), make()
    prefix, rest = IDS[:1, :4], IDS[:, 4:]
    with observe(parts.targets.values(), torch.ones(4, 6), prefix=4):
        cache = parts.model(input_ids=prefix, use_cache=True).past_key_values
        cache.batch_repeat_interleave(4)
        parts.model(input_ids=rest, past_key_values=cache, use_cache=True)
    with observe(whole.targets.values()):
        whole.model(input_ids=torch.cat([prefix.expand(4, -1), rest], 1))
    assert {t.how.source.finder.tokens for t in parts.targets.values()} == {28} and {t.how.source.finder.tokens for t in whole.targets.values()} == {40}
    once, four = make(), make()
    with observe(once.targets.values()):
        once.model(input_ids=prefix)
    with observe(four.targets.values(), torch.ones(4, 6), prefix=4):
        four.model(input_ids=prefix)
    for name, target in once.targets.items():
        assert torch.allclose(four.targets[name].how.source.finder._sum_RK, 2 * target.how.source.finder._sum_RK, atol=1e-5)  # √4 times


def test_refusals():
    logra = make()
    with pytest.raises(ValueError, match=r"mask \(4, 9\) does not fit the input \(4, 10, 32\)"), observe(logra.targets.values(), torch.ones(4, 9)):
        logra.model(input_ids=IDS)
    assert not any(t.module._forward_pre_hooks for t in logra.targets.values())
    policy_loss(logra.model, IDS).backward()
    with pytest.raises(RuntimeError, match="in use already"), observe(logra.targets.values()):
        pass
    with pytest.raises(ConfigError, match="'activation' only"):
        observe(LoGRA(tiny_llama(), SketchConfig(rank=4)).targets.values()).__enter__()
    with pytest.raises(ConfigError, match="drop_leading = 1: allowed is 0 where projection is not activation"):
        SketchConfig(drop_leading=1)
    with pytest.raises(ConfigError, match=r"rank = 30 \(and drop_leading 3 more\).*has 32"):
        make(rank=30, drop_leading=3)
    logra.step()
    with observe(logra.targets.values()):
        assert not torch.is_grad_enabled()
        logra.model(input_ids=IDS)
    policy_loss(logra.model, IDS).backward()
    logra.targets[NAME].how.source.finder._rows[0, 0] = float("nan")  # what was used, spoiled: caught before a weight changes
    before = logra.weights.fingerprint()
    with pytest.raises(NonFiniteError):
        logra.step()
    assert logra.weights.fingerprint() == before and logra.version == 1


@pytest.mark.parametrize("where", ["loss", "inputs"])
def test_after_a_refused_batch_the_next_one_is_scored_anew(where):
    """What was found for the bad batch is gone with zero_grad: the next projection is that of a run that never saw it."""
    logra, clean = make(), make()
    bad = {"loss": float("nan"), "inputs": 1.0}[where]
    if where == "inputs":
        hook = logra.model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * float("nan"), *args[1:]))
    score(logra, IDS)
    with pytest.raises(NonFiniteError):
        (policy_loss(logra.model, IDS) * bad).backward()
        logra.propose()
    if where == "inputs":
        hook.remove()
    logra.zero_grad()
    for one in (logra, clean):
        score(one, IDS)
        policy_loss(one.model, IDS).backward()
    ours, theirs = logra.propose(), clean.propose()
    assert ours.bases.keys() == theirs.bases.keys() == ours.factors.keys()
    assert all(torch.equal(ours.bases[n], theirs.bases[n]) and torch.equal(ours.factors[n], theirs.factors[n]) for n in ours.factors)


def test_zero_grad_before_the_first_backward_keeps_what_was_scored_and_after_it_old_graphs_are_refused():
    logra = make()
    score(logra, IDS)
    logra.zero_grad()
    assert all(t.how.by_value for t in logra.targets.values())
    loss = policy_loss(logra.model, IDS)
    logra.zero_grad()
    assert not any(t.how.by_value for t in logra.targets.values())
    score(logra, IDS)
    with pytest.raises(RuntimeError, match="zero_grad"):
        loss.backward()
