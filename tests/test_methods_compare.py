"""LoRA and GaLore behind the loop's interface: peft's own merge and galore-torch's own optimizer are the oracles."""

import pytest
import torch
from models import policy_loss, probe_batch, random_ids, tiny_llama
from test_train import first_digit, run, settings
from tiny import tiny_policy

from logra_core import ConfigError, NonFiniteError, Replica
from logra_core.rl import checkpoint
from logra_core.rl.methods import galore_classes, make_method
from logra_core.rl.settings import METHODS, GaLoreConfig, LoRAConfig, TrainConfig
from logra_core.rl.trainer import Trainer
from logra_core.variants import SketchConfig

LORA = LoRAConfig(lr=1e-2, rank=4, alpha=8.0, warmup=0)
GALORE = GaLoreConfig(lr=1e-2, rank=4, update_proj_gap=3, warmup=0, final_fraction=1.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def made(method: str, seed: int = 0, **changes):
    model = tiny_llama()
    return model, make_method(model, TrainConfig(method=method, seed=seed, **({"lora": LORA, "galore": GALORE} | changes)))


def take(model, method, seed: int = 0, updates: int = 1):
    """Updates by real gradients; returns the last message."""
    for step in range(updates):
        policy_loss(model, random_ids(3, 12, 96, seed + step), seed + step).backward()
        message = method.apply(method.propose(), 1.0)
    return message


def test_lora_merges_what_peft_merges_and_the_replica_holds_it():
    model, method = made("lora")
    plain, names = tiny_llama(), set(method.weights.modules)
    base = {n: m.weight.clone() for n, m in plain.named_modules() if n in names}
    assert all(torch.equal(method.weights.master(n), W) for n, W in base.items())  # B = 0
    replica = Replica(plain, SketchConfig().targets)
    message = take(model, method, updates=3)
    assert message.full and method.version == 3
    replica.resync(message.data)
    assert replica.weights.fingerprint() == method.weights.fingerprint()
    for name, W in base.items():
        layer = model.get_submodule(name)
        assert torch.equal(layer.base_layer.weight, W)  # frozen
        A, B = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        merged = method.weights.master(name)
        assert torch.allclose(merged.double(), W.double() + 2.0 * B @ A, atol=1e-7) and not torch.equal(merged, W)
        assert torch.allclose(merged, W + layer.get_delta_weight("default"), atol=1e-7)
    ids = random_ids(2, 10, 96)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trains) == 2 * 21 and all("lora_" in n for n in trains)
    with pytest.raises(RuntimeError, match="through the factors"):
        method.weights.merge_(next(iter(names)), torch.zeros(1), torch.zeros(1))


def test_lora_starts_from_the_runs_seed_alone():
    starts = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = tiny_llama()
        torch.set_rng_state(state)
        method = make_method(model, TrainConfig(method="lora", seed=seed, lora=LORA))
        assert torch.equal(torch.get_rng_state(), state)
        starts.append(torch.cat([p.detach().flatten() for p in method.trained()]))
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_galore_is_the_librarys_optimizer():
    """Seven updates over three subspaces, with the gradients of our own run, against a plain loop of galore-torch's AdamW."""
    model, method = made("galore")
    other = {n: p.detach().clone().requires_grad_() for n, p in method.parameters.items()}
    adamw, _ = galore_classes()
    group = {"params": list(other.values()), "rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    library = adamw([group], 1e-2, (0.9, 0.95), 1e-8, no_deprecation_warning=True)
    start = {n: p.detach().clone() for n, p in method.parameters.items()}
    for step in range(7):
        policy_loss(model, random_ids(3, 12, 96, step), step).backward()
        for name, p in method.parameters.items():
            other[name].grad = p.grad.clone()
        method.apply(method.propose(), 1.0)
        library.step()
    for name, p in method.parameters.items():
        assert float((p - other[name]).detach().norm() / (p - start[name]).detach().norm()) < 1e-4
        state = method.optimizer.state[p]
        d, k = p.shape
        assert state["exp_avg"].shape == ((d, 4) if d >= k else (4, k))
        matrix = state["projector"].ortho_matrix  # rank rows, and no more behind them
        assert matrix.untyped_storage().nbytes() == 4 * 4 * min(d, k) and matrix.is_contiguous()


@pytest.mark.parametrize("method", ["lora", "galore"])
def test_state_survives_a_checkpoint_to_the_bit(method, tmp_path):
    """Into a new model and method through a file: the next updates, one of which draws a new subspace, are the same bits."""
    (model, first), (copy, second) = made(method), made(method, seed=5)
    take(model, first, updates=2)
    weights = {n: first.weights.master(n) for n in first.weights.modules}
    checkpoint.save(tmp_path, 2, weights, {"method": first.state_dict()})
    weights, state = checkpoint.load(checkpoint.latest(tmp_path))
    second.load_state_dict(state["method"])
    with torch.no_grad():
        for name, W in weights.items():
            second.weights.set_(name, W)
    assert second.weights.fingerprint() == first.weights.fingerprint() and (second.version, second.run_id) == (2, first.run_id)
    assert checkpoint.frozen_digest(model, first.trained()) == checkpoint.frozen_digest(copy, second.trained())
    for m, one in ((model, first), (copy, second)):
        take(m, one, seed=2, updates=3)
    assert second.weights.fingerprint() == first.weights.fingerprint() and str(second.state_dict()) == str(first.state_dict())


@pytest.mark.parametrize("method", ["lora", "galore"])
def test_refusals(method):
    model, one = made(method)
    before = one.weights.fingerprint(), str(one.state_dict())
    with pytest.raises(RuntimeError, match="no gradient for"):
        one.propose()
    policy_loss(model, random_ids(3, 12, 96)).backward()
    next(iter(one.parameters.values())).grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="gradient of model.layers.0.self_attn.q_proj"):
        one.propose()
    assert (one.weights.fingerprint(), str(one.state_dict())) == before
    assert one.scale(None, probe_batch(random_ids(2, 8, 96), 3), 0.0) == 1.0 and one.metrics()["alpha"] == 1.0
    with pytest.raises(ConfigError, match="trains fp32 weights"):
        make_method(tiny_llama().bfloat16(), TrainConfig(method=method))


@pytest.mark.parametrize("method, library", [("lora", "peft"), ("galore", "galore_torch")])
def test_a_missing_library_is_named(method, library, monkeypatch):
    monkeypatch.setattr("logra_core.rl.methods.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        made(method)


@pytest.mark.parametrize("method", ["lora", "galore"])
def test_a_run_on_another_base_model_is_refused(policy, tmp_path, method):
    """LoRA's base weights are frozen: a checkpoint is of one base. Rows hold what those of dense AdamW hold."""
    other = tiny_policy(tmp_path / "other", seed=1)
    cfg = settings(other, tmp_path / "run", method=method, updates=2, lora={"rank": 4, "lr": 1e-3, "warmup": 0}, galore={"rank": 4})
    trainer, end, header, rows = run(cfg, first_digit)
    updates = [r for r in rows if r["kind"] == "update"]
    assert all(r["alpha"] == 1.0 and r["q"] is None and r["lr"] > 0 and r["payload_bytes"] > r["full_weights_bytes"] for r in updates)
    assert header["config"]["method"] == method in METHODS and trainer.engine.fingerprint() == end["fingerprint"]
    tiny_policy(other, seed=2)
    with pytest.raises(checkpoint.CheckpointError, match="another model"):
        Trainer(settings(other, tmp_path / "run", method=method, updates=3, lora={"rank": 4, "lr": 1e-3, "warmup": 0}, galore={"rank": 4})).run()
