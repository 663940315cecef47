"""ppo.py against float64 loops written here straight from the formulas."""

import copy
import itertools
import math
import random

import pytest
import torch
from tiny import tiny_policy

from logra_core.engines.policy import load_policy
from logra_core.engines.rollout import Rollouts
from logra_core.planning.memory import TrackMemory
from logra_core.rl import ppo


def loop_loss(logp, old, rollout, advantages, mask, tokens, clip, cap):
    """The loss, token by token in Python floats."""
    total = 0.0
    for i, t in itertools.product(range(len(logp)), range(len(logp[0]))):
        if mask[i][t]:
            ratio = math.exp(logp[i][t] - old[i][t])
            weight = min(math.exp(old[i][t] - rollout[i][t]), cap)
            clipped = min(max(ratio, 1 - clip), 1 + clip)
            total -= weight * min(ratio * advantages[i], clipped * advantages[i])
    return total / tokens


def batch(seed=0, rows=6, width=9):
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, width, generator=g) * 5
    rollout = logp + 0.8 * torch.randn(rows, width, generator=g)
    old = logp + 0.3 * torch.randn(rows, width, generator=g)
    advantages = torch.randn(rows, generator=g)
    lengths = torch.randint(1, width, (rows,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    return logp, old, rollout, advantages, mask


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_and_gradient_equal_the_loop(seed, on_policy):
    logp, old, rollout, advantages, mask = batch(seed)
    if on_policy:
        old = logp.clone()
    tokens = int(mask.sum())
    logp.requires_grad_(True)
    loss, stats = ppo.ppo_loss(logp, rollout, advantages, mask, tokens, 0.2, 2.0, None if on_policy else old)
    loss.backward()
    lists = [x.detach().double().tolist() for x in (logp, old, rollout, advantages)]
    expected = loop_loss(*lists, mask.tolist(), tokens, 0.2, 2.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for i, t in itertools.product(range(mask.shape[0]), range(mask.shape[1])):  # gradient: central differences of the loop
        if not on_policy and abs(abs(math.exp(lists[0][i][t] - lists[1][i][t]) - 1) - 0.2) < 1e-3:
            continue  # at the kink
        h, values = 1e-5, []
        for sign in (1, -1):
            moved = [row[:] for row in lists[0]]
            moved[i][t] += sign * h
            values.append(loop_loss(moved, *lists[1:], mask.tolist(), tokens, 0.2, 2.0))
        assert float(logp.grad[i, t]) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-3, abs=1e-6)
    inside = [(i, t) for i, t in itertools.product(range(mask.shape[0]), range(mask.shape[1])) if mask[i, t]]
    weights = [min(math.exp(lists[1][i][t] - lists[2][i][t]), 2.0) for i, t in inside]
    assert stats["tokens"] == len(inside)
    assert stats["tis_sum"] == pytest.approx(sum(weights), rel=1e-5)
    assert stats["tis_capped"] == sum(math.exp(lists[1][i][t] - lists[2][i][t]) > 2.0 for i, t in inside) > 0
    assert stats["ratio_clipped"] == sum(abs(math.exp(lists[0][i][t] - lists[1][i][t]) - 1) > 0.2 for i, t in inside)


def test_clipping_binds_off_policy_only_on_the_bad_side():
    logp = torch.tensor([[math.log(1.5)], [math.log(0.5)]], requires_grad=True)
    zero, mask = torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    loss, _ = ppo.ppo_loss(logp, zero, torch.tensor([1.0, 1.0]), mask, 2, 0.2, 2.0, zero)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 + 0.5) / 2)
    assert logp.grad[0, 0] == 0 and logp.grad[1, 0] != 0


def test_microbatch_losses_add_up_whatever_the_split_and_the_lengths():
    logp, old, rollout, advantages, mask = batch(3, rows=7)
    tokens = int(mask.sum())
    whole = ppo.ppo_loss(logp, rollout, advantages, mask, tokens)[0]
    for size in (1, 2, 3):
        parts = [slice(i, i + size) for i in range(0, 7, size)]
        split = sum(ppo.ppo_loss(logp[s], rollout[s], advantages[s], mask[s], tokens)[0] for s in parts)
        assert float(split) == pytest.approx(float(whole), abs=2e-7)  # fp32 sums in another order


def test_padding_changes_nothing_and_nan_in_padding_stays_out():
    logp, old, rollout, advantages, mask = batch(1)
    tokens = int(mask.sum())
    whole = ppo.ppo_loss(logp, rollout, advantages, mask, tokens)[0]
    wide = [torch.nn.functional.pad(x, (2, 3), value=float("nan")) for x in (logp, rollout)]
    padded, stats = ppo.ppo_loss(*wide, advantages, torch.nn.functional.pad(mask, (2, 3)), tokens)
    assert torch.equal(whole, padded)
    assert math.isfinite(stats["tis_sum"])


def test_importance_weights_are_capped_detached_and_finite():
    trainer = torch.tensor([0.0, -1.0, -2.0, 500.0], requires_grad=True)
    w = ppo.tis_weights(trainer, torch.tensor([0.0, -2.0, -1.0, -500.0]), 2.0)
    assert not w.requires_grad
    assert w.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 2.0])
    with pytest.raises(ValueError, match="cap = 0.5"):
        ppo.tis_weights(trainer, trainer, 0.5)


def test_baseline_uses_past_batches_only():
    generator, baseline, value = random.Random(0), ppo.RunningBaseline(0.1), 0.0
    for _ in range(20):
        rewards = ppo.rewards_of([generator.random() < 0.4 for _ in range(12)], -0.01)
        assert baseline.advantages(rewards).tolist() == pytest.approx([r - value for r in rewards.tolist()], abs=1e-6)
        baseline.observe(rewards)
        value = 0.9 * value + 0.1 * (sum(rewards.double().tolist()) / 12)
        assert baseline.value == pytest.approx(value, abs=1e-9)
    other = ppo.RunningBaseline(0.1)
    other.load_state_dict(baseline.state_dict())
    assert other.value == baseline.value
    with pytest.raises(ValueError, match="weight 0.1"):
        ppo.RunningBaseline(0.2).load_state_dict(baseline.state_dict())
    with pytest.raises(ValueError, match="nan"):
        baseline.observe(torch.tensor([float("nan")]))
    assert other.value == baseline.value


def test_rewards_of_failures():
    assert ppo.rewards_of([True, False], -0.01).tolist() == pytest.approx([1.0, -0.01])


def test_mismatch_counts_finished_responses_and_never_goes_negative():
    rollout, trainer = torch.tensor([[0.0, -1.0, -1.0], [0.0, -5.0, 0.0]]), torch.tensor([[0.0, -1.5, -1.1], [0.0, -1.0, 0.0]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    assert ppo.mismatch(rollout, trainer, mask, torch.tensor([True, False])) == pytest.approx((0.5 + 0.1) / 2, rel=1e-6)
    assert ppo.mismatch(rollout, trainer, mask, torch.tensor([True, True])) == 0.0  # mean is -3.4 / 3
    assert ppo.mismatch(rollout, trainer, mask, torch.tensor([False, False])) == 0.0
    with pytest.raises(ValueError, match="nan"):
        ppo.mismatch(rollout * float("nan"), trainer, mask, torch.tensor([True, True]))
    with pytest.raises(ValueError, match="expected"):
        ppo.mismatch(rollout, trainer, mask, torch.tensor([True]))


def test_pass_at_k_equals_enumeration():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert ppo.pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    for bad in ((4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass_at_k"):
            ppo.pass_at_k(*bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.__setitem__(1, a[1][:, :-1]), "must be"),
        (lambda a: a.__setitem__(2, a[2][:-1]), "advantages"),
        (lambda a: a.__setitem__(3, torch.zeros_like(a[3])), "marks 0 tokens"),
        (lambda a: a.__setitem__(4, 1), "batch_tokens = 1"),
        (lambda a: a.__setitem__(3, a[3].long()), "torch.bool"),
    ],
)
def test_loss_refuses_bad_input(change, message):
    logp, _, rollout, advantages, mask = batch()
    arguments = [logp, rollout, advantages, mask, int(mask.sum())]
    change(arguments)
    with pytest.raises(ValueError, match=message):
        ppo.ppo_loss(*arguments)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(tiny_policy(tmp_path_factory.mktemp("policy")))


def fake_rollouts(lengths, pad_inside=True):
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(2, 90, (n,), generator=g)  # noqa: E731
    prompts, responses = [draw(p) for p, _ in lengths], [draw(r) for _, r in lengths]
    if pad_inside:
        responses[0][-1] = 1  # the pad id as a real token
    return Rollouts(prompts, responses, [torch.zeros(len(r)) for r in responses], ["stop"] * len(prompts), [""] * len(prompts), 0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sequence_logprobs_equal_one_unpadded_forward_per_sequence(policy, temperature):
    model, _ = policy
    rollouts = fake_rollouts([(5, 4), (9, 1), (3, 7)])
    padded = rollouts.padded(1)
    got = ppo.sequence_logprobs(model, padded, temperature).detach()
    assert got.shape == padded["input_ids"].shape and got.dtype == torch.float32
    assert (got[~padded["response_mask"]] == 0).all()
    for i, (prompt, response) in enumerate(zip(rollouts.prompt_ids, rollouts.response_ids)):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0].double() / temperature
        for t, token in enumerate(response.tolist()):
            row = logits[len(prompt) + t - 1]
            expected = float(row[token]) - math.log(math.fsum(math.exp(v) for v in row.tolist()))
            assert float(got[i, padded["response_mask"][i]][t]) == pytest.approx(expected, abs=2e-5)


def test_a_shared_prefix_gives_the_same_logprobs_and_gradients(policy):
    model, _ = policy
    whole = fake_rollouts([(15, 4), (19, 1), (13, 7)])
    for p in whole.prompt_ids:
        p[:10] = torch.arange(40, 50)
    weights = [m.weight for n, m in model.named_modules() if n.endswith("proj")]
    for w in weights:
        w.requires_grad_(True)
    made = []
    for skip in (0, 10):
        padded = whole.padded(1, skip=skip)
        logp = ppo.sequence_logprobs(model, padded, 0.7, whole.prompt_ids[0][:skip])[padded["response_mask"]]
        logp.sum().backward()
        made.append((logp.detach(), [w.grad for w in weights]))
        for w in weights:
            w.grad = None
    assert float((made[0][0] - made[1][0]).abs().max()) < 2e-5
    for a, b in zip(made[0][1], made[1][1]):
        assert float((a - b).norm() / a.norm()) < 1e-5


def test_sequence_logprobs_differentiate_and_refuse(policy):
    model, _ = policy
    padded = fake_rollouts([(5, 4), (9, 1)]).padded(1)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.requires_grad_(True)
    ppo.sequence_logprobs(model, padded).sum().backward()
    assert float(weight.grad.norm()) > 0
    weight.grad = None
    with pytest.raises(ValueError, match="temperature = 0"):
        ppo.sequence_logprobs(model, padded, 0)
    with pytest.raises(ValueError, match="at least one token"):
        ppo.sequence_logprobs(model, padded | {"response_mask": torch.zeros_like(padded["response_mask"])})


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_logits_in_chunks_give_the_same_logprobs_and_gradients(policy, chunk, prefix):
    """Up to the order in which products are summed: measured 3e-6 in the log-probs and 8e-7 of a gradient's norm."""
    model = copy.deepcopy(policy[0]).requires_grad_(True)
    model.zero_grad()
    whole = fake_rollouts([(5, 4), (9, 1), (4, 7)])
    for p in whole.prompt_ids:
        p[:prefix] = torch.arange(40, 40 + prefix)
    padded, weights = whole.padded(1, skip=prefix), dict(model.named_parameters())
    made = []
    for size in (0, chunk):
        logp = ppo.sequence_logprobs(model, padded, 0.7, whole.prompt_ids[0][:prefix], size)
        (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum().backward()
        made.append((logp.detach(), {n: w.grad for n, w in weights.items()}))
        model.zero_grad()
    assert made[0][0].shape == made[1][0].shape and float((made[0][0] - made[1][0]).abs().max()) < 1e-5  # of log-probs of size 10
    for name, g in made[0][1].items():
        assert g is not None and float((g - made[1][1][name]).norm() / g.norm()) < 2e-6, name
    assert "forward" not in model.get_output_embeddings().__dict__


def test_logits_in_chunks_lower_the_peak():
    """8,192 words, 256 tokens: all at once four [N, V] fp32 tensors live in backward; in chunks of 32 four of an eighth of that size."""
    head, chunk = torch.nn.Linear(16, 8192, bias=False), 32
    hidden, labels = torch.randn(2, 128, 16, requires_grad=True), torch.randint(0, 8192, (2, 128))
    peaks, whole = {}, 4 * 256 * 8192
    for size in (0, chunk):
        with TrackMemory() as tracked:
            ppo.token_logprobs(head, hidden, labels, 0.7, size).sum().backward()
        peaks[size] = tracked.peak
    assert 3 * whole < peaks[0] < 6 * whole
    assert peaks[chunk] < 6 * whole * chunk / 256 + 4 * head.weight.numel() * 3  # and the head's own gradient
    assert peaks[chunk] < peaks[0] / 4


def test_chunks_refuse_a_model_that_changes_its_logits(policy):
    class Capped(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.get_input_embeddings, self.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings

        def forward(self, **inputs):
            out = self.model(**inputs)
            out.logits = 30 * torch.tanh(out.logits / 30)
            return out

    padded = fake_rollouts([(5, 4), (9, 1)]).padded(1)
    capped = Capped(policy[0])
    assert ppo.sequence_logprobs(capped, padded).isfinite().all()
    with pytest.raises(ValueError, match="Capped changes the logits.*use 0"):
        ppo.sequence_logprobs(capped, padded, chunk=2)
    with pytest.raises(ValueError, match="chunk = -1"):
        ppo.sequence_logprobs(policy[0], padded, chunk=-1)
