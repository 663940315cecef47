"""What the core promises whoever takes it into a loop of their own: an update is whole or refused, nothing is lost in silence."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from models import SWITCHES, drawn, policy_loss, probe_batch, random_ids, score, tiny_llama
from torch import nn

from logra_core import (
    ConfigError,
    KLConfig,
    LoGRA,
    MissingSketchError,
    OptimConfig,
    ProjectionSpec,
    Replica,
    SketchConfig,
    SketchUpdate,
    StepController,
    SyncError,
    attach,
    exact_kl,
    full_state_bytes,
    predict_q,
    variants,
)
from logra_core.sketch import SKETCH, LayerSketch
from logra_core.weights import Weights

IDS = random_ids(2, 8, 96)
TARGETS = SketchConfig().targets


def backward(logra, ids=IDS) -> None:
    policy_loss(logra.model, ids).backward()


# ---------------------------------------------------------------- apply is whole, or every later call says so


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_after_an_error_between_merges_every_call_is_refused_until_a_state_is_loaded(error, monkeypatch):
    logra = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-2))
    saved = copy.deepcopy((logra.model.state_dict(), logra.state_dict()))
    backward(logra)
    update, before, merge, calls = logra.propose(), logra.weights.fingerprint(), Weights.merge_, []

    def fails_at_the_fourth(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise error("no memory")
        merge(self, *args)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Weights, "merge_", fails_at_the_fourth)
        logra.apply(update)
    assert logra.weights.fingerprint() != before and logra.version == 0  # three layers have moved
    for call in (lambda: logra.apply(update), logra.propose, logra.step):
        with pytest.raises(RuntimeError, match=f"update 1 failed after 3 of 21 layers .{error.__name__}.*load the model's state"):
            call()
    logra.model.load_state_dict(saved[0])
    logra.load_state_dict(saved[1])
    assert logra.weights.fingerprint() == before
    backward(logra)
    logra.step()
    assert logra.version == 1


def test_messages_carry_the_fingerprint_unless_told_not_to():
    """Two policies that differ: the next message is refused by the replica without a word from the sender."""
    logra, replica = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-2)), Replica(tiny_llama(seed=1), TARGETS)
    backward(logra)
    sent = logra.apply(logra.propose())
    data = sent.to_bytes()
    assert SketchUpdate.from_bytes(data).fingerprint == logra.weights.fingerprint() != ""
    with pytest.raises(SyncError, match="the copies had drifted"):
        replica.apply(data)
    replica.apply(sent.to_bytes(fingerprint=""))  # by wish
    assert replica.version == 1
    backward(logra)
    logra.step()
    with pytest.raises(SyncError, match="weights that have moved on"):
        sent.to_bytes()


def test_step_keeps_what_it_would_send():
    logra, replica = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-2)), Replica(tiny_llama(), TARGETS)
    assert logra.sent is None
    for t in range(3):
        backward(logra)
        logra.step()
        replica.apply(logra.sent.to_bytes())
        assert replica.version == logra.version == t + 1
    assert replica.fingerprint() == logra.weights.fingerprint()


# ---------------------------------------------------------------- targets that a batch does not reach


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x, left: bool):
        return (self.a if left else self.b)(x)


@pytest.mark.parametrize("rule", ["row_adam", "sgd", "orthogonal"])
@pytest.mark.parametrize("switch", [{}, {"kind": "two_sided"}, {"refresh_every": 2}])
def test_a_target_that_no_backward_reached_has_a_zero_sketch(rule, switch):
    torch.manual_seed(0)
    beta1 = 0.9 if "refresh_every" in switch else 0.0
    logra = LoGRA(Branch(), variants.SketchConfig(rank=2, targets=("a", "b"), **switch), variants.OptimConfig(update_ratio=1e-2, rule=rule, beta1=beta1))
    kept = logra.targets["b"].weight.detach().clone()
    for _ in range(2):
        logra.model(torch.randn(4, 6), True).square().sum().backward()
        update = logra.propose()
        assert float(update.factors["a"].norm()) > 0 == float(update.factors["b"].norm())
        logra.apply(update)
        assert torch.equal(logra.targets["b"].weight, kept)
    logra.model(torch.randn(4, 6), False).square().sum().backward()
    logra.step()
    assert not torch.equal(logra.targets["b"].weight, kept)
    with pytest.raises(MissingSketchError, match="any of 2 targets"):
        logra.propose()


# ---------------------------------------------------------------- misuse is named


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_model_cast_after_attaching_is_named_in_forward_and_in_propose(cast):
    logra = LoGRA(tiny_llama(), SketchConfig(rank=4))
    backward(logra)
    logra.model.to(cast)
    with pytest.raises(RuntimeError, match="q_proj' was cast or moved after LoGRA was attached"):
        logra.propose()
    with pytest.raises(RuntimeError, match="q_proj' was cast to .* after its sketch was attached: cast the model first"):
        backward(logra)


@pytest.mark.parametrize("switch", ["one_sided", "two_sided"])
def test_a_backward_between_propose_and_apply_is_refused_and_then_counted(switch):
    logra, twin = (LoGRA(tiny_llama(), variants.SketchConfig(rank=4, **SWITCHES[switch]), OptimConfig(update_ratio=1e-2)) for _ in range(2))
    backward(logra)
    update, before = logra.propose(), logra.weights.fingerprint()
    more = random_ids(2, 8, 96, 5)
    backward(logra, more)
    with pytest.raises(RuntimeError, match="a backward pass came between propose and apply"):
        logra.apply(update)
    assert logra.weights.fingerprint() == before and logra.version == 0
    logra.apply(logra.propose())
    backward(twin)
    backward(twin, more)
    twin.step()
    assert twin.weights.fingerprint() == logra.weights.fingerprint()


def test_after_detach_it_says_so():
    logra = LoGRA(tiny_llama(), SketchConfig(rank=4))
    backward(logra)
    logra.detach()
    for call in (logra.propose, logra.step):
        with pytest.raises(RuntimeError, match="was detached from its model: make a new one"):
            call()


def test_weights_that_share_memory_are_refused_as_a_shared_parameter_is():
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 6), "head": nn.Linear(6, 7, bias=False), "free": nn.Linear(6, 7)})
    attach(model, SketchConfig(rank=2, targets=("head", "free")))
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 6), "head": nn.Linear(6, 7, bias=False)})
    model["head"].weight = nn.Parameter(model["embedding"].weight.data)
    with pytest.raises(ConfigError, match="the weight of 'head' is tied to another module"):
        attach(model, SketchConfig(rank=2, targets=("head",)))
    flat = torch.randn(2 * 42)  # parts of one buffer that do not overlap are no tie
    parts = nn.ModuleDict({"a": nn.Linear(6, 7, bias=False), "b": nn.Linear(6, 7, bias=False)})
    for i, layer in enumerate(parts.values()):
        layer.weight = nn.Parameter(flat[42 * i : 42 * (i + 1)].view(7, 6))
    assert len(attach(parts, SketchConfig(rank=2, targets=("a", "b")))) == 2


# ---------------------------------------------------------------- any module, any use of its outputs


class InPlace(nn.Module):
    """Changes the output of a target in place. how: by which operation."""

    def __init__(self, how: str, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.a, self.b = how, nn.Linear(6, 5, bias=bias), nn.Linear(5, 4, bias=bias)

    def forward(self, x):
        o = self.a(x)
        if self.how == "relu":
            o = F.relu_(o)
        elif self.how == "add":
            o += 0.5 * x[..., :5]
        elif self.how == "silu":
            o = F.silu(o, inplace=True)
        elif self.how == "slice":
            o[..., 1:3] *= 2.0
        return self.b(o)


@pytest.mark.parametrize("kind", ["one_sided", "two_sided"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6)])
@pytest.mark.parametrize("how", ["relu", "add", "silu", "slice", "none"])
def test_an_output_changed_in_place_trains_as_without_the_sketch(how, shape, bias, kind):
    model, x = InPlace(how, bias), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = model(x)
    plain.square().sum().backward()
    G = {n: m.weight.grad.clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    model.zero_grad()
    targets = attach(model, variants.SketchConfig(rank=3, targets=("a", "b"), kind=kind))
    x.requires_grad_()
    out = model(x)
    assert torch.equal(out, plain)
    out.square().sum().backward()
    for name, target in targets.items():
        found = target.sketch.grad if kind == "one_sided" else target.how.parts(target.sketch.grad)[0]
        assert torch.allclose(found, G[name] @ target.projection().T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["jvp", "finite_difference"])
def test_kl_control_of_a_module_that_is_no_language_model(estimator):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9)), torch.randn(30, 6)
    logra = LoGRA(model, SketchConfig(rank=3, targets=("0", "2")), OptimConfig(update_ratio=1e-2))
    model(x).log_softmax(-1)[:, 0].mean().backward()
    update = logra.propose()
    config = KLConfig(schedule="constant", budget=1e-5, estimator=estimator, probe_step=0.05, alpha_max=100)
    controller = StepController(config, logits=lambda model, batch: model(batch))
    alpha = controller.scale(model, update, x)
    assert exact_kl(model, update, x, alpha, logits=controller.logits) == pytest.approx(1e-5, rel=0.05)
    mine = StepController(config, estimator=lambda model, update, probe, config, last, logits: 4.0)
    assert mine.scale(model, update, None) == pytest.approx(math.sqrt(1e-5 / 4.0))


@pytest.mark.parametrize("switch", [s for s in SWITCHES])
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_an_attached_model_can_be_copied_and_its_placeholders_stay_without_storage(how, switch):
    logra = LoGRA(tiny_llama().to(torch.bfloat16), variants.SketchConfig(rank=4, **SWITCHES[switch]), OptimConfig(update_ratio=1e-2))
    score(logra, IDS)
    backward(logra)
    twin = pickle.loads(pickle.dumps(logra.model)) if how == "pickle" else copy.deepcopy(logra.model)
    sketches = [p for n, p in twin.named_parameters() if n.endswith(SKETCH)]
    assert len(sketches) == 21 and all(p.untyped_storage().nbytes() == 4 and p.requires_grad and p.grad is None for p in sketches)
    kept = {n: p.grad.clone() for n, p in logra.model.named_parameters() if n.endswith(SKETCH)}
    policy_loss(twin, IDS).backward()  # its own sketches, of its own layers
    assert all(p.grad is not None for p in sketches)
    for name, target in logra.targets.items():
        assert target.module is logra.model.get_submodule(name) is not twin.get_submodule(name)
        assert torch.equal(target.sketch.grad, kept[name + "." + SKETCH])
    assert {k: v.shape for k, v in twin.state_dict().items()} == {k: v.shape for k, v in logra.model.state_dict().items()}


# ---------------------------------------------------------------- what the docstrings say


@pytest.mark.parametrize("rank", [4, 5, 16, 128])
def test_under_autocast_the_sketch_is_of_a_rounded_a_by_one_factor(rank):
    """The factor that LoGRA's docstring names: bf16(1/√r) √r, 1 where r is a power of 4."""
    spec = SketchConfig(rank=rank)
    logra = LoGRA(tiny_llama(), spec)
    target = next(iter(logra.targets.values()))
    ratio = (target.projection(torch.bfloat16).double() / target.projection().double()).unique()
    factor = float(torch.tensor(rank**-0.5).to(torch.bfloat16)) * rank**0.5
    assert ratio.numel() == 1 and float(ratio) == pytest.approx(factor, rel=1e-6) and abs(float(ratio) - 1) <= 2**-8
    assert (abs(factor - 1) < 1e-6) == (math.log(rank, 4) % 1 == 0)


def test_no_update_keeps_two_draws_alive():
    logra = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-2))
    backward(logra)
    update = logra.propose()
    assert all(update.drawn[n] is t.projection() for n, t in logra.targets.items())  # at hand, not a copy
    old = {n: t.projection().clone() for n, t in logra.targets.items()}
    sent = logra.apply(update)
    assert not update.drawn and not sent.drawn and not any(drawn(t) for t in logra.targets.values())
    assert all(torch.equal(sent.basis(n), A) for n, A in old.items())  # from its bits
    assert sum(p.bits.nbytes for p in sent.projections.values()) < sum(A.nbytes for A in old.values())


def test_a_sketch_a_rule_and_an_estimator_of_ones_own_plug_in():
    """As notebook 15 shows it: columns of G by chance, signs of S, and a q that somebody else computes."""

    class EveryOther(LayerSketch):
        """Every other column of G."""

        by_value = True

        @property
        def shape(self):
            return self.module.out_features, -(-self.module.in_features // 2)

        def keep(self, x, dtype):
            return (x.detach().to(dtype).reshape(-1, x.shape[-1])[:, ::2],)

        def factors(self, accumulated):
            return accumulated, torch.eye(self.module.in_features)[::2]

    class Signs:
        def start(self, rows, columns, device):
            return {}

        def __call__(self, S_DR, V_RK, state, step, moved_DR=None):
            return S_DR.sign(), {}

    def every_other(layers, config, wire_dtype):
        return {n: EveryOther(n, layer, ProjectionSpec(config.seed, 0, 1, "rademacher")) for n, layer in layers.items()}

    logra = LoGRA(tiny_llama(), SketchConfig(), OptimConfig(update_ratio=1e-2), sketcher=every_other, rule=Signs())
    dense = tiny_llama()
    policy_loss(dense, IDS).backward()
    replica = Replica(tiny_llama(), TARGETS)
    for t in range(2):
        backward(logra, random_ids(2, 8, 96, t) if t else IDS)
        if t == 0:
            for n, target in logra.targets.items():
                assert torch.allclose(target.sketch.grad, dense.get_submodule(n).weight.grad[:, ::2], atol=1e-6)
        update = logra.propose()
        assert predict_q(logra.model, update, probe_batch(IDS, 3), KLConfig()) > 0
        replica.apply(logra.apply(update).to_bytes())
    assert replica.fingerprint() == logra.weights.fingerprint()
    fresh = Replica(tiny_llama(), TARGETS)
    fresh.resync(full_state_bytes(logra.weights, logra.run_id, logra.version))
    assert fresh.fingerprint() == replica.fingerprint()
