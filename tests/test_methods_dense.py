"""Dense AdamW under KL control: torch's own optimizer and the sketched update's q are the oracles."""

import dataclasses

import pytest
import torch
from models import policy_loss, probe_batch, random_ids, tiny_llama
from test_train import first_digit, run, settings
from tiny import tiny_policy

from logra_core import ConfigError, NonFiniteError, exact_kl
from logra_core.kl import predict_q
from logra_core.rl.methods import DenseUpdate, dense_lr, make_method
from logra_core.rl.settings import DenseConfig, TrainConfig
from logra_core.rl.trainer import Trainer
from logra_core.sync import SketchUpdate
from logra_core.variants import KLConfig, OptimConfig, SketchConfig



@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def controlled(model, schedule="constant", **dense):
    cfg = TrainConfig(
        method="dense", dense=DenseConfig(**({"lr": 1e-3, "warmup": 2, "horizon": 6, "kl_control": True} | dense)),
        kl=KLConfig(schedule=schedule, budget=1e-5, mismatch=False), optim=OptimConfig(), sketch=SketchConfig(),
    )  # fmt: skip
    return make_method(model, cfg)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_a_budget_it_is_torch_adamw(weight_decay):
    """Six updates over warm-up and decay: weights within fp32 rounding, moments to the bit."""
    ours, theirs, ids = tiny_llama(), tiny_llama(), random_ids(3, 12, 96)
    method = controlled(ours, "none", weight_decay=weight_decay)
    plain = controlled(theirs, kl_control=False, weight_decay=weight_decay)
    assert type(plain.optimizer) is torch.optim.AdamW and not hasattr(plain, "controller")
    for step in range(6):
        for model, m in ((ours, method), (theirs, plain)):
            for name, p in m.parameters.items():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step - 3)
            update = m.propose()
            m.apply(update, m.scale(update, probe_batch(ids, 5), 0.0))
        assert method.metrics()["lr"] == plain.metrics()["lr"] == dense_lr(method.cfg, step + 1)
    untrained = dict(tiny_llama().named_modules())
    for name, p in method.parameters.items():
        q, start = plain.parameters[name], untrained[name].weight
        apart, moved = (p - q).detach(), (q - start).detach()
        assert float(apart.abs().max()) <= 1e-6 and float(apart.norm() / moved.norm()) < 1e-4
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(method.optimizer.state[p][key], plain.optimizer.state[q][key]), key


@pytest.mark.parametrize("estimator", ["jvp", "finite_difference"])
def test_q_and_exact_kl_equal_those_of_the_same_change_as_factors(estimator):
    """A change D [D, K] is also U V with U = D, V = 1 (all K directions)."""
    model, ids = tiny_llama(), random_ids(3, 12, 96)
    method = controlled(model)
    policy_loss(model, ids).backward()
    update, probe, config = method.propose(), probe_batch(ids, 5), KLConfig(estimator=estimator, probe_step=1e-1)
    widths = {n: D.shape[1] for n, D in update.factors.items()}
    factored = SketchUpdate("run", 1, update.factors, {n: torch.eye(k) for n, k in widths.items()})
    assert predict_q(model, update, probe, config) == pytest.approx(predict_q(model, factored, probe, config), rel=1e-5)
    assert exact_kl(model, update, probe, 0.3) == pytest.approx(exact_kl(model, factored, probe, 0.3), rel=1e-5)


def test_the_budget_decides_the_step_and_moments_do_not_depend_on_it():
    model, ids = tiny_llama(), random_ids(3, 12, 96)
    method, probe = controlled(model), probe_batch(ids, 5)
    policy_loss(model, ids).backward()
    before, gradients = {n: p.clone() for n, p in method.parameters.items()}, {n: p.grad.clone() for n, p in method.parameters.items()}
    update = method.propose()
    alpha = method.scale(update, probe, 0.0)
    assert 0 < alpha < 3 and method.exact_kl(update, probe, alpha) == pytest.approx(1e-5, rel=0.1)
    assert all(torch.equal(p, before[n]) for n, p in method.parameters.items()) and method.version == 0
    assert all(float(s["exp_avg"].abs().max()) == 0 == float(s["step"]) for s in method.optimizer.state.values())
    method.apply(update, alpha)
    for n, p in method.parameters.items():
        assert torch.allclose(p, before[n] - alpha * update.factors[n], atol=1e-7)
        assert torch.allclose(method.optimizer.state[p]["exp_avg"], 0.1 * gradients[n], rtol=1e-5)
    assert method.version == 1 and method.grad_norm() == 0
    with pytest.raises(RuntimeError, match="propose again"):
        method.apply(update, alpha)


def test_a_bad_number_changes_nothing(monkeypatch):
    model, ids = tiny_llama(), random_ids(3, 12, 96)
    method, probe = controlled(model), probe_batch(ids, 5)
    policy_loss(model, ids).backward()
    method.apply(update := method.propose(), method.scale(update, probe, 0.0))
    before = method.weights.fingerprint(), str(method.state_dict())
    policy_loss(model, ids).backward()
    update = method.propose()
    for alpha in (float("nan"), float("inf"), -1.0):
        with pytest.raises(NonFiniteError, match="alpha"):
            method.apply(update, alpha)
    monkeypatch.setattr("logra_core.kl.q_jvp", lambda *a: float("nan"))
    with pytest.raises(NonFiniteError, match="not taken"):
        method.scale(update, probe, 1e-4)
    p = method.parameters["model.layers.1.mlp.up_proj"]
    for value in (float("nan"), float("inf"), 1e30):
        p.grad[0, 0] = value
        with pytest.raises(NonFiniteError, match="layers.1.mlp.up_proj"):
            method.propose()
    assert (method.weights.fingerprint(), str(method.state_dict())) == before


def test_an_unknown_layer_is_refused_by_name():
    update = DenseUpdate(1, {"model.layers.9.mlp.up_proj": torch.zeros(48, 32)})
    with pytest.raises(ConfigError, match="layers.9"):
        predict_q(tiny_llama(), update, probe_batch(random_ids(2, 8, 96), 3), KLConfig())


def test_rows_of_a_controlled_run(policy, tmp_path):
    cfg = settings(policy, tmp_path, method="dense", dense={"kl_control": True, "lr": 1e-2}, updates=3)
    trainer, end, _, rows = run(cfg, first_digit)
    for r in (r for r in rows if r["kind"] == "update"):
        assert r["predicted_kl"] == pytest.approx(r["alpha"] ** 2 * r["q"]) and 0 < r["predicted_kl"] <= r["effective_budget"] * 1.000001
        assert r["alpha"] < 3 and r["exact_kl"] == pytest.approx(r["predicted_kl"], rel=0.3) and 0 < r["lr"] <= 1e-2
        assert r["payload_bytes"] > r["full_weights_bytes"]
    assert trainer.engine.fingerprint() == end["fingerprint"]
    with pytest.raises(ConfigError, match="kl.temperature = 1.0, sampling.temperature = 0.6"):
        Trainer(dataclasses.replace(cfg, sampling=dataclasses.replace(cfg.sampling, temperature=0.6)))
