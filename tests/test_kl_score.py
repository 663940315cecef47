"""The score-sketch estimator of q: against per-sequence dense gradients in float64, against the exact q on average, and what it leaves behind."""

from collections import Counter

import pytest
import torch
from models import SWITCHES, drawn, half_training, policy_loss, probe_batch, random_ids, score, tiny_llama
from torch import nn

from logra_core import ConfigError, LoGRA, NonFiniteError, ProbeBatch, StepController, predict_q
from logra_core.kl import context_logits, probing, q_jvp
from logra_core.variants import KLConfig, OptimConfig, SketchConfig
from logra_core.variants.score import _tapped, _uniforms, draw_tokens, paused, q_score_sketch, scores

IDS = random_ids(3, 12, 96)


def proposal(model, switch="one_sided"):
    logra = LoGRA(model, SketchConfig(rank=8, **SWITCHES[switch]), OptimConfig(update_ratio=1e-2))
    score(logra, IDS)
    policy_loss(model, IDS).backward()
    return logra, logra.propose()


def all_scores(model, update, probe, uniform, temperature):
    with probing(model), paused(model), torch.enable_grad(), _tapped(model, update) as taps:
        return torch.stack(list(scores(model, probe, taps, uniform, temperature)))


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_each_sequence_against_its_dense_gradient_in_float64(switch, temperature):
    model = tiny_llama()
    _, update = proposal(model, switch)
    mask = torch.zeros_like(IDS, dtype=torch.bool)
    for row, first in enumerate((5, 8, 3)):  # responses of unequal length
        mask[row, first:] = True
    probe = ProbeBatch(IDS, torch.ones_like(IDS), mask)
    uniform = _uniforms(1, probe, 2, Counter())
    ours = all_scores(model, update, probe, uniform, temperature)
    exact = tiny_llama().double()
    weights = {n: m.weight for n, m in exact.named_modules() if n in update.factors}
    for s, u in enumerate(uniform):
        with torch.no_grad():
            tokens, _ = draw_tokens(context_logits(model, probe), u, temperature)
        for row, v in enumerate(tokens.split(mask.sum(1).tolist())):
            logp = torch.log_softmax(exact(input_ids=IDS[row : row + 1]).logits[0, :-1][mask[row, 1:]].double() / temperature, -1)
            G = torch.autograd.grad(logp.gather(1, v[:, None]).sum(), list(weights.values()))
            expected = sum(float((g * (update.factors[n].double() @ update.basis(n).double())).sum()) for n, g in zip(weights, G, strict=True))
            assert float(ours[s, row]) == pytest.approx(expected, rel=1e-5, abs=1e-5 * float(ours.abs().max()))


@pytest.mark.parametrize("switch, temperature", [("one_sided", 1.0), ("two_sided", 0.7), ("activation", 1.3)])
def test_on_average_it_is_q(switch, temperature):
    model = tiny_llama()
    _, update = proposal(model, switch)
    probe, samples = probe_batch(IDS, 5), 400
    values = all_scores(model, update, probe, _uniforms(1, probe, samples, Counter()), temperature).square().sum(1) / (2 * probe.contexts)
    error, q = float(values.std() / samples**0.5), q_jvp(model, update, probe, temperature)
    print(f"{switch}: mean {float(values.mean()):.4g} ± {error:.1g}, exact {q:.4g}; one sample {float(values.std()) / q:.0%}")
    assert float(values.mean()) == pytest.approx(q_score_sketch(model, update, probe, samples, temperature), rel=1e-6)
    assert abs(float(values.mean()) - q) <= 3 * error and error < 0.08 * q
    assert 0.8 < float(values.std()) / q / (2 / 3) ** 0.5 < 1.6  # three sequences, of seven contexts each and not of equal weight


def test_tokens_follow_the_policy():
    torch.manual_seed(0)
    z = 2 * torch.randn(1, 7)
    p = torch.softmax(z.double() / 0.8, -1)[0]
    tokens, grad = draw_tokens(z.expand(4000, 7), torch.rand(4000, dtype=torch.float64), 0.8)
    counts = tokens.bincount(minlength=7) / 4000
    assert float(((counts - p) / (p * (1 - p) / 4000).sqrt()).abs().max()) < 4
    assert torch.allclose(grad.double(), (nn.functional.one_hot(tokens, 7) - p) / 0.8, atol=1e-6)
    edges, _ = draw_tokens(z.expand(2, 7), torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0)
    assert edges.tolist() == [0, 6]


def test_padding_parts_and_seed(monkeypatch):
    model = tiny_llama()
    _, update = proposal(model)
    probe = probe_batch(IDS, 5)
    whole = q_score_sketch(model, update, probe, 3)
    torch.manual_seed(123)  # the global state does not matter
    assert q_score_sketch(model, update, probe, 3) == whole
    monkeypatch.setattr("logra_core.kl.LOGITS", 1)
    assert q_score_sketch(model, update, probe, 3) == pytest.approx(whole, rel=1e-5)
    pad = torch.zeros(3, 4, dtype=torch.long)
    padded = ProbeBatch(*(torch.cat([pad.to(t.dtype), t, pad.to(t.dtype)], 1) for t in (probe.input_ids, probe.attention_mask, probe.response_mask)))
    assert q_score_sketch(model, update, padded, 3) == pytest.approx(whole, rel=1e-5)
    first = _uniforms(1, probe, 3, Counter())
    assert not torch.equal(first, _uniforms(2, probe, 3, Counter())) and float(first.min()) > 0 and float(first.max()) < 1
    twice = ProbeBatch(*(torch.cat([t, t]) for t in (probe.input_ids, probe.attention_mask, probe.response_mask)))
    a, b = _uniforms(1, twice, 3, Counter()).chunk(2, 1)
    assert torch.equal(a, first) and not (a == b).any()  # copies of a sequence have draws of their own


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("switch", ["one_sided", "two_sided", "shared activation"])
def test_it_leaves_everything_as_it_found_it(switch, checkpointing, dropout):
    model = half_training(checkpointing, dropout)
    logra, update = proposal(model, switch)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    sketches = {n: t.sketch.grad.clone() for n, t in logra.targets.items()}
    before_drawn = {n: {k: id(v) for k, v in drawn(t).items()} for n, t in logra.targets.items()}
    modes, hooks = [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]
    state = torch.get_rng_state()
    config = KLConfig(estimator="score_sketch", score_samples=2)
    with torch.no_grad():  # as within LoGRA.step()
        q = predict_q(model, update, probe_batch(IDS, 5), config)
    assert q > 0 and torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes and [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for n, p in model.named_parameters() if not n.endswith("logra_sketch"))
    assert all(torch.equal(t.sketch.grad, sketches[n]) and t._handle is not None for n, t in logra.targets.items())
    assert {n: {k: id(v) for k, v in drawn(t).items()} for n, t in logra.targets.items()} == before_drawn
    plain = tiny_llama(attention_dropout=dropout)
    assert q == pytest.approx(predict_q(plain, update, probe_batch(IDS, 5), config), rel=1e-5)
    policy_loss(model, IDS).backward()  # accumulation goes on
    if not dropout:
        assert all(torch.allclose(t.sketch.grad, 2 * sketches[n], rtol=1e-4, atol=1e-6) for n, t in logra.targets.items())


def test_blocks_that_checkpoint_recompute_in_the_probe_too(monkeypatch):
    import transformers.modeling_layers

    model, calls = tiny_llama(), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, update = proposal(model)
    block = type(model.model.layers[0])
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *a, **k: (calls.append(1), forward(*a, **k))[1])
    assert isinstance(model.model.layers[0], transformers.modeling_layers.GradientCheckpointingLayer)
    q = q_score_sketch(model, update, probe_batch(IDS, 5), 2)
    assert len(calls) == 3 * 3  # once forward, once again in each of two backward passes
    assert q == pytest.approx(q_score_sketch(tiny_llama(), update, probe_batch(IDS, 5), 2), rel=1e-5)


def test_the_controller_uses_it():
    model = tiny_llama()
    _, update = proposal(model)
    control = StepController(KLConfig(schedule="constant", budget=1e-5, alpha_max=1e9, estimator="score_sketch", score_samples=300))
    alpha = control.scale(model, update, probe_batch(IDS, 5))
    q = q_jvp(model, update, probe_batch(IDS, 5))
    assert control.last["estimator"] == "score_sketch" and alpha == pytest.approx((1e-5 / q) ** 0.5, rel=0.15)


def test_what_is_refused():
    model, config = tiny_llama(), KLConfig(estimator="score_sketch")
    logra, update = proposal(model)
    with pytest.raises(ConfigError, match="layers the model lacks"):
        q_score_sketch(nn.Module(), update, probe_batch(IDS, 5), 1)
    before = logra.weights.fingerprint()
    update.factors["model.layers.1.mlp.up_proj"][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="not taken"):
        StepController(config).scale(model, update, probe_batch(IDS, 5))
    assert logra.weights.fingerprint() == before and not any(t._handle is None for t in logra.targets.values())
    model, update = tiny_llama(), proposal(tiny_llama())[1]
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(NonFiniteError):
        predict_q(model, update, probe_batch(IDS, 5), config)
