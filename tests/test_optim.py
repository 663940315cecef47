"""RowAdam against float64 loops; LoGRA as an optimizer: size, schedulers, masters, refusals, bit-exact restore."""

import copy
import io
import math

import pytest
import torch
from models import SWITCHES, policy_loss, random_ids, score, tiny_llama

from logra_core import ConfigError, LoGRA, MissingSketchError, NonFiniteError, row_adam, sgd
from logra_core.lab import reference
from logra_core.optim import product_norm_sq
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.momentum import first_moment
from logra_core.variants.orthogonal import orthogonal

NAME = "model.layers.1.mlp.up_proj"
IDS = random_ids(2, 8, 96)


def make(model=None, rank=4, refresh=True, refresh_every=1, distribution="rademacher", switch="one_sided", **optim):
    config = SketchConfig(**({"rank": rank, "refresh": refresh, "refresh_every": refresh_every, "distribution": distribution} | SWITCHES[switch]))
    return LoGRA(model or tiny_llama(), config, OptimConfig(**({"update_ratio": 1e-3} | optim)))


def train(logra, steps, first=0):
    for t in range(first, first + steps):
        score(logra, random_ids(2, 8, 96, t))
        policy_loss(logra.model, random_ids(2, 8, 96, t), t).backward()
        logra.step()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e8])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-2])
def test_row_adam_against_float64_loops(scale, eps):
    torch.manual_seed(0)
    v = w = torch.zeros(6)
    for step in range(1, 5):
        S = scale * torch.randn(6, 5) * torch.logspace(-3, 3, 6)[:, None]
        U, v = row_adam(S, v, step, 0.95, eps)
        V, w = reference.row_adam(S, w, step, 0.95, eps)
        assert torch.allclose(U.double(), V, rtol=2e-5, atol=0), step
        assert torch.allclose(v.double(), w, rtol=1e-5, atol=0)
        assert float(U.norm()) == pytest.approx(float(S.norm()), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e8])
def test_first_moment_and_row_adam_of_it_against_float64_loops(scale):
    """torch's own Adam gives the corrected mean: with β2 = 0 and a huge ε its step is lr m̂ / ε. RowAdam's scale comes from S alone."""
    torch.manual_seed(0)
    m, v, w = torch.zeros(6, 5), torch.zeros(6), torch.zeros(6)
    p = torch.zeros(6, 5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([p], lr=1e30, betas=(0.9, 0.0), eps=1e30)
    for step in range(1, 6):
        S = scale * torch.randn(6, 5) * torch.logspace(-3, 3, 6)[:, None]
        before, p.grad = p.detach().clone(), S.double()
        adam.step()
        expected = before - p.detach()
        mean, m = first_moment(S, m, step, 0.9)
        assert ((mean - expected).abs().amax(1) <= 1e-6 * expected.abs().amax(1)).all()
        U, v = row_adam(S, v, step, 0.95, 1e-8, mean)
        V, w = reference.row_adam(S, w, step, 0.95, 1e-8)
        rows = (V.norm(dim=1) / S.double().norm(dim=1))[:, None] * expected
        rows *= expected.norm() / rows.norm()
        assert ((U - rows).abs().amax(1) <= 1e-5 * rows.abs().amax(1)).all()
        assert torch.allclose(v.double(), w, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rule", "every"), [("row_adam", None), ("sgd", None), ("orthogonal", None), ("row_adam", 2), ("sgd", 3)])
def test_momentum_steps_along_the_mean_of_the_sketches(rule, every):
    """The factor is what the rule makes of the mean of all sketches made with the same A so far; proposing twice changes nothing."""
    logra = make(**({"refresh": False} if every is None else {"refresh_every": every}), rule=rule, beta1=0.9, wire_dtype="float32")
    sketches, v = [], torch.zeros(logra.targets[NAME].module.out_features)
    for t in range(3 if every is None else 5):
        if every is not None and t % every == 0:
            sketches = []
        policy_loss(logra.model, random_ids(2, 8, 96, t), t).backward()
        sketches.append(logra.targets[NAME].sketch.grad.double().clone())
        age = len(sketches)
        mean = sum(0.9 ** (age - 1 - i) * S for i, S in enumerate(sketches)) * 0.1 / (1 - 0.9**age)
        scaled, v = reference.row_adam(sketches[-1], v, t + 1, 0.95, 1e-8)
        if rule == "row_adam":
            mean = (scaled.norm(dim=1) / sketches[-1].norm(dim=1))[:, None] * mean
        elif rule == "orthogonal":
            mean = orthogonal(mean.float(), logra.targets[NAME].projection()).double()
        first, again = logra.propose().factors[NAME], logra.propose()
        assert torch.equal(first, again.factors[NAME])
        assert torch.nn.functional.cosine_similarity(first.double().flatten(), mean.flatten(), dim=0) == pytest.approx(1, abs=1e-6)
        logra.apply(again)
    assert logra.state[logra.targets[NAME].sketch]["m"].isfinite().all()


def test_momentum_needs_one_basis():
    for changes in ({}, {"refresh": False, "switch": "two_sided"}, {"refresh_every": 3, "switch": "two_sided"}, {"switch": "activation"}):
        with pytest.raises(ConfigError, match="SketchConfig.(refresh|kind|projection) = .*where OptimConfig.beta1 > 0"):
            make(beta1=0.9, **changes)
    with pytest.raises(ConfigError, match="beta1 = 1.0: allowed is 0 <= beta1 < 1"):
        make(beta1=1.0)


def test_row_adam_of_zero_rows_and_zero_sketches():
    S = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    U, v = row_adam(S, torch.zeros(2), 1, 0.95, 1e-8)
    assert torch.isfinite(U).all() and torch.equal(U[0], torch.zeros(2)) and float(U.norm()) == pytest.approx(5.0)
    U, v = row_adam(torch.zeros(3, 2), torch.zeros(3), 1, 0.95, 1e-8)
    assert torch.equal(U, torch.zeros(3, 2)) and torch.equal(v, torch.zeros(3))


def test_pure_functions_leave_their_inputs():
    S, v = torch.randn(4, 3), torch.rand(4)
    before = S.clone(), v.clone()
    row_adam(S, v, 1, 0.9, 1e-8)[0].zero_(), sgd(S).zero_()
    assert torch.equal(S, before[0]) and torch.equal(v, before[1])


def test_product_norm_without_the_product():
    torch.manual_seed(0)
    U, V = torch.randn(30, 7), torch.randn(7, 50)
    assert float(product_norm_sq(U, V)) == pytest.approx(float((U.double() @ V.double()).square().sum()), rel=1e-5)


SKETCHES = [("one_sided", d) for d in ("rademacher", "gaussian", "orthonormal", "coordinates")] + [(s, "rademacher") for s in SWITCHES if s != "one_sided"]


@pytest.mark.parametrize("rule", ["row_adam", "sgd", "orthogonal"])
@pytest.mark.parametrize("switch, distribution", SKETCHES)
def test_update_has_the_ratio_asked_for(rule, switch, distribution):
    logra = make(rule=rule, switch=switch, distribution=distribution, wire_dtype="float32")
    before = {n: t.weight.detach().clone() for n, t in logra.targets.items()}
    score(logra, IDS)
    policy_loss(logra.model, IDS).backward()
    logra.step()
    moved = math.sqrt(sum(float((t.weight.double() - before[n].double()).square().sum()) for n, t in logra.targets.items()))
    whole = math.sqrt(sum(float(W.double().square().sum()) for W in before.values()))
    assert moved / whole == pytest.approx(1e-3, rel=1e-4)


def test_step_is_rowadam_of_the_dense_gradient_sketched():
    """One whole step of every layer in float64 loops: G, S = G Aᵀ, RowAdam, global size, W − U A."""
    model = tiny_llama()
    policy_loss(model, IDS).backward()
    dense = {n.removesuffix(".weight"): p.grad.double() for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    model.zero_grad()
    logra = make(model, wire_dtype="float32")
    before = {n: t.weight.detach().double().clone() for n, t in logra.targets.items()}
    A = {n: t.projection().double() for n, t in logra.targets.items()}
    U = {n: reference.row_adam(dense[n] @ A[n].T, torch.zeros(len(dense[n])), 1, 0.95, 1e-8)[0] for n in dense}
    size = math.sqrt(sum(float((U[n] @ A[n]).square().sum()) for n in U))
    factor = 1e-3 * math.sqrt(sum(float(W.square().sum()) for W in before.values())) / size
    policy_loss(model, IDS).backward()
    logra.step()
    for n, target in logra.targets.items():
        expected = before[n] - factor * U[n] @ A[n]
        assert (target.weight.double() - expected).abs().max() <= 1e-7  # fp32 weights of size 0.1 round at 4e-9


def test_all_coordinates_are_rowadam_on_the_exact_gradient():
    """r = k in every layer: nothing of G is lost, and the step is what the rule makes of G itself."""
    model = tiny_llama()
    policy_loss(model, IDS).backward()
    dense = {n.removesuffix(".weight"): p.grad.double() for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    model.zero_grad()
    logra = LoGRA(model, SketchConfig(rank=32, ranks={"down_proj": 48}, distribution="coordinates"), OptimConfig(update_ratio=1e-3, wire_dtype="float32"))
    before = {n: t.weight.detach().double().clone() for n, t in logra.targets.items()}
    change = {n: reference.row_adam(G_DK, torch.zeros(len(G_DK)), 1, 0.95, 1e-8)[0] for n, G_DK in dense.items()}
    factor = 1e-3 * math.sqrt(sum(float(W.square().sum()) for W in before.values()) / sum(float(c.square().sum()) for c in change.values()))
    policy_loss(model, IDS).backward()
    logra.step()
    for n, target in logra.targets.items():
        assert (target.weight.double() - (before[n] - factor * change[n])).abs().max() <= 1e-7, n


@pytest.mark.parametrize("rule", ["row_adam", "orthogonal"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_zero_gradient_gives_a_zero_update(switch, rule):
    logra = make(switch=switch, rule=rule)
    before = logra.weights.fingerprint()
    (0.0 * policy_loss(logra.model, IDS)).backward()
    logra.step()
    assert logra.version == 1 and logra.weights.fingerprint() == before


@pytest.mark.parametrize("switch", SWITCHES)
def test_one_step_for_all_microbatches(switch):
    whole, parts = (make(tiny_llama(), switch=switch, wire_dtype="float32") for _ in range(2))
    ids = random_ids(4, 8, 96)
    for logra in (whole, parts):
        score(logra, ids)
    policy_loss(whole.model, ids).backward()
    advantage = torch.randn(4, 1, generator=torch.Generator().manual_seed(1))
    for row in range(4):
        logp = parts.model(input_ids=ids[row : row + 1]).logits.log_softmax(-1)[:, :-1].gather(-1, ids[row : row + 1, 1:, None])
        (-(logp.squeeze(-1) * advantage[row]).mean() / 4).backward()
    for n, t in whole.targets.items():
        assert torch.allclose(t.sketch.grad, parts.targets[n].sketch.grad, rtol=1e-4, atol=1e-7)
    updates = [logra.propose() for logra in (whole, parts)]
    for n, U in updates[0].factors.items():
        steps = [u.factors[n] @ u.basis(n) for u in updates]
        assert float((steps[0] - steps[1]).norm() / steps[0].norm()) < 1e-3, n
    parts.step()
    assert parts.version == 1 and all(t.sketch.grad is None for t in parts.targets.values())


def test_learning_rate_schedulers_scale_the_update():
    logra = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(logra, lambda t: 1 / (1 + t))
    sizes = []
    for _ in range(3):
        policy_loss(logra.model, IDS).backward()
        update = logra.propose()
        sizes.append(math.sqrt(sum(float(product_norm_sq(U, update.basis(n))) for n, U in update.factors.items())))
        logra.apply(update)
        scheduler.step()
    assert sizes[1] / sizes[0] == pytest.approx(1 / 2, rel=1e-2) and sizes[2] / sizes[0] == pytest.approx(1 / 3, rel=1e-2)


def test_propose_changes_nothing_and_apply_takes_only_the_last_proposal():
    logra = make()
    policy_loss(logra.model, IDS).backward()
    before = logra.weights.fingerprint()
    first, second = logra.propose(), logra.propose()
    assert logra.weights.fingerprint() == before and logra.version == 0
    assert all(torch.equal(first.factors[n], second.factors[n]) for n in first.factors)
    with pytest.raises(RuntimeError, match="not the one last proposed"):
        logra.apply(first)
    for alpha in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match="alpha"):
            logra.apply(second, alpha)
    assert logra.weights.fingerprint() == before and logra.version == 0
    logra.apply(second)
    with pytest.raises(RuntimeError, match="not the one last proposed"):
        logra.apply(second)
    assert logra.version == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_numbers_stop_the_step(bad):
    logra = make()
    policy_loss(logra.model, IDS).backward()
    before, state = logra.weights.fingerprint(), torch.stack([s["v"].sum() for s in logra.state.values()])
    name = "model.layers.1.mlp.up_proj"
    logra.targets[name].sketch.grad[3, 1] = bad
    with pytest.raises(NonFiniteError, match=name):
        logra.step()
    assert logra.weights.fingerprint() == before and logra.version == 0
    assert torch.equal(torch.stack([s["v"].sum() for s in logra.state.values()]), state)
    logra.zero_grad()
    policy_loss(logra.model, IDS).backward()
    with pytest.raises(NonFiniteError, match="factor"):
        logra.apply(logra.propose(), 1e30)  # finite still, but U A could overflow in a weight
    logra.targets[name].weight.data[0, 0] = bad
    with pytest.raises(NonFiniteError, match="norm of the weights"):
        logra.propose()
    assert logra.version == 0


@pytest.mark.parametrize("refresh", [True, False])
def test_refresh_changes_the_projection_and_the_rank_of_the_sum(refresh):
    logra = make(rank=2, refresh=refresh)
    name = "model.layers.0.mlp.down_proj"
    A, before = logra.targets[name].projection().clone(), logra.targets[name].weight.detach().clone()
    train(logra, 1)
    assert torch.equal(A, logra.targets[name].projection()) is not refresh
    train(logra, 3, 1)
    total = (logra.targets[name].weight.detach() - before).double()
    assert int((torch.linalg.svdvals(total) > 1e-4 * total.norm()).sum()) == (8 if refresh else 2)


def test_refresh_every_keeps_one_projection_for_so_many_updates():
    logra = make(rank=2, refresh_every=3)
    before, seen = logra.targets[NAME].weight.detach().clone(), []
    for t in range(7):
        seen.append(logra.targets[NAME].projection().clone())
        train(logra, 1, t)
    assert [torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)] == [True, True, False, True, True, False]
    total = (logra.targets[NAME].weight.detach() - before).double()
    assert int((torch.linalg.svdvals(total) > 1e-4 * total.norm()).sum()) == 6  # three draws of two rows


def test_a_state_older_than_refresh_every_is_read():
    saved = make().state_dict()
    del saved["param_groups"][0]["logra"]["sketch"]["refresh_every"]
    make().load_state_dict(saved)
    with pytest.raises(ConfigError, match="sketch.refresh_every: saved 1, here 2"):
        make(refresh_every=2).load_state_dict(saved)


STATES = [*((s, {}) for s in SWITCHES), *(("one_sided", {"beta1": 0.9} | a) for a in ({"refresh": False}, {"refresh_every": 2}, {"refresh_every": 4}))]


@pytest.mark.parametrize(("switch", "more"), STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_bit_for_bit(dtype, switch, more):
    unbroken = make(tiny_llama().to(dtype), switch=switch, **more)
    train(unbroken, 3)
    file = io.BytesIO()
    torch.save({"optimizer": unbroken.state_dict(), "model": unbroken.model.state_dict()}, file)
    train(unbroken, 3, 3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make(tiny_llama(seed=9).to(dtype), switch=switch, **more)
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.version == 3 and resumed.run_id == unbroken.run_id
    train(resumed, 3, 3)
    assert resumed.weights.fingerprint() == unbroken.weights.fingerprint()
    for p, q in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(resumed.state.values(), unbroken.state.values(), strict=True):
        assert p.keys() == q.keys() and all(torch.equal(p[k], q[k]) for k in p)


def test_state_of_other_settings_is_refused():
    saved = make(rank=4).state_dict()
    with pytest.raises(ConfigError, match="sketch.*rank"):
        make(rank=8).load_state_dict(saved)
    for switch in ("two_sided", "activation", "shared", "hadamard"):
        with pytest.raises(ConfigError, match=r"sketch\.\w+: saved"):
            make(switch=switch).load_state_dict(saved)
    with pytest.raises(ConfigError, match="rule"):
        make(rule="sgd").load_state_dict(saved)
    with pytest.raises(ConfigError, match="beta1: saved 0.0, here 0.9"):
        make(refresh=False, beta1=0.9).load_state_dict(make(refresh=False).state_dict())
    with pytest.raises(ConfigError, match="other layers"):
        make(tiny_llama(num_hidden_layers=2)).load_state_dict(saved)
    with pytest.raises(ConfigError, match="not a state of LoGRA"):
        make().load_state_dict(torch.optim.SGD(make().param_groups[0]["params"]).state_dict())


def test_masters_keep_small_updates_that_bf16_would_lose():
    """Steps of 3e-6 of the weights: in bf16 alone a few per cent of the entries ever move; with fp32 masters all do."""
    logra = make(tiny_llama().to(torch.bfloat16), update_ratio=3e-6)
    before = {n: m.clone() for n, m in logra.weights.masters.items()}
    added = {n: m.bfloat16() for n, m in before.items()}
    for t in range(100):
        policy_loss(logra.model, random_ids(2, 8, 96, t), t).backward()
        wire = logra.apply(logra.propose())
        for n, U in wire.factors.items():
            added[n] -= (U.float() @ wire.basis(n)).bfloat16()

    def moved(weights):
        return float(torch.cat([(weights[n] != W).flatten() for n, W in before.items()]).float().mean())

    print(f"moved after 100 steps: {moved(logra.weights.masters):.1%} of the masters, {moved(added):.1%} of plain bf16 weights")
    assert moved(logra.weights.masters) > 0.95 and moved(added) < 0.5  # q and k of this toy move by less than an fp32 ulp
    for n, t in logra.targets.items():
        assert torch.equal(t.weight, logra.weights.masters[n].to(torch.bfloat16))


def test_closure_and_scale():
    logra = make()
    logra.scale = lambda update: 0.0
    before = logra.weights.fingerprint()

    def closure():
        logra.zero_grad()
        loss = policy_loss(logra.model, IDS)
        loss.backward()
        return loss

    assert torch.is_tensor(logra.step(closure)) and logra.version == 1 and logra.weights.fingerprint() == before


def test_factor_is_rounded_once():
    """α U in fp32, then to bf16: the same bits as the two steps apart."""
    logra = make()
    policy_loss(logra.model, IDS).backward()
    update = logra.propose()
    for alpha in (0.0, 1 / 3, 1.0, 2.7):
        wire = update.scaled(alpha, torch.bfloat16)
        assert all(torch.equal(wire.factors[n], (U * alpha).to(torch.bfloat16)) for n, U in update.factors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_the_model_loads_are_what_the_next_update_starts_from(dtype):
    """Going back to an earlier policy in the middle of a run: masters of the layers follow."""
    logra = make(tiny_llama().to(dtype), update_ratio=0.1)  # no layer stays where it was, even rounded
    good = {k: v.clone() for k, v in logra.model.state_dict().items()}
    before = logra.weights.fingerprint()
    train(logra, 2)
    logra.model.load_state_dict(good)
    assert logra.weights.fingerprint() == before
    fresh = make(tiny_llama().to(dtype), update_ratio=0.1)
    for other in (logra, fresh):  # the moments differ, so the same update is given to both
        policy_loss(other.model, IDS).backward()
    update = fresh.propose()
    for name, U in update.factors.items():
        for other in (logra, fresh):
            other.weights.merge_(name, U, update.basis(name))
    assert logra.weights.fingerprint() == fresh.weights.fingerprint()


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_masters_that_round_to_the_loaded_weights_stay(first):
    """A checkpoint of both, restored in either order, and a copy of the model left alone."""
    logra = make(tiny_llama().to(torch.bfloat16))
    train(logra, 2)
    saved = copy.deepcopy((logra.model.state_dict(), logra.state_dict()))
    ours, twin = logra.weights.fingerprint(), copy.deepcopy(logra.model)
    train(logra, 1, 2)
    twin.load_state_dict(saved[0])
    later = logra.weights.fingerprint()
    assert later != ours  # the copy's loading did not reach this model
    for load in (logra.model.load_state_dict, logra.load_state_dict)[:: 1 if first == "model" else -1]:
        load(saved[0] if load == logra.model.load_state_dict else saved[1])
    assert logra.weights.fingerprint() == ours and logra.weights.fingerprint() != later


def test_a_state_that_was_loaded_is_not_changed_by_what_follows():
    logra = make(tiny_llama().to(torch.bfloat16))
    snapshot, prints = copy.deepcopy((logra.model.state_dict(), logra.state_dict())), []
    for _ in range(3):
        logra.load_state_dict(snapshot[1])
        logra.model.load_state_dict(snapshot[0])
        prints.append(logra.weights.fingerprint())
        train(logra, 1)
    assert len(set(prints)) == 1


def test_loading_drops_what_had_accumulated_for_another_draw():
    logra = make()
    saved = copy.deepcopy(logra.state_dict())
    train(logra, 1)
    policy_loss(logra.model, IDS).backward()
    logra.load_state_dict(saved)
    with pytest.raises(MissingSketchError):
        logra.propose()


def test_other_parameters_are_refused():
    logra = make()
    with pytest.raises(ConfigError, match="an optimizer of their own"):
        logra.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(logra.param_groups) == 1


@pytest.mark.parametrize("bad", [0.0, 1e-30])
def test_an_eps_that_a_dead_row_would_turn_against_the_others(bad):
    with pytest.raises(ConfigError, match="OptimConfig.eps"):
        OptimConfig(eps=bad)
    S = torch.ones(3, 4)
    S[1] = 0.0  # no gradient reaches this output
    U, _ = row_adam(S, torch.zeros(3), 1, 0.95, 1e-12)
    assert float(U.norm()) == pytest.approx(float(S.norm()), rel=1e-5)
