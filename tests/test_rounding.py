"""Stochastic rounding against a float64 oracle; bf16 weights without masters on trainer and replica, bit for bit."""

import copy
import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from models import SWITCHES, policy_loss, random_ids, real_llm, tiny_llama
from test_sync import FAULTS, NAME, TARGETS, failing_at_the_tenth, full_state_bytes, pair, refused_whole, rewrite, update

from logra_core import ConfigError, LoGRA, NonFiniteError, Replica, SketchUpdate, SyncError
from logra_core.kl import add_on_grid, cut_or_nan
from logra_core.lab.reference import stochastic_round as oracle
from logra_core.rl.settings import TrainConfig
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.rounding import CHUNK, Rounding, Stochastic, random_bits, stochastic_round
from logra_core.weights import TINY, Weights

BF16 = torch.bfloat16
ON = {"stochastic_rounding": True}
LARGEST = torch.finfo(BF16).max


def rounded(x, seed=0, name="l", **where):
    return stochastic_round(x, Rounding(seed, 1), name, **where)


def values(count=4000, seed=0):
    """fp32 of both signs over the exponents of weights, and some far ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g) * torch.exp2(torch.randint(-30, 3, (count,), generator=g).float())
    return torch.cat([x, torch.tensor([1e30, -1e30, 3e-38, -3e-38, 1 - 2**-9, -(1 - 2**-10), 0.0])])[None]


# ---------------------------------------------------------------- the rounding


def test_every_element_is_one_of_its_two_neighbours_as_the_oracle_says():
    x = values()
    bits = random_bits(Rounding(7, 3), "l", x.shape[1], slice(0, 1))
    assert torch.equal(stochastic_round(x, Rounding(7, 3), "l"), oracle(x, torch.from_numpy(bits.astype(np.int64))))


def test_the_probability_of_a_step_up_is_the_place_between_the_neighbours():
    """x = ±1.5 (1 + f ulp): the share of steps away from zero is f, within 4 standard errors of 2^18 draws; f = 0 never moves."""
    n = 2**18
    for f in (0.0, 2**-16, 1 / 256, 0.25, 0.5, 0.9, 1 - 2**-16):
        for sign in (1, -1):
            base = torch.tensor(1.5)
            x = sign * (base.view(torch.int32) + round(f * 2**16)).view(torch.float32)
            made = rounded(x.expand(64, n // 64), seed=1).float().abs()
            share = float((made > 1.5).float().mean())
            assert set(made.unique().tolist()) <= {1.5, 1.5 + 2**-7}
            assert abs(share - f) <= 4 * math.sqrt(f * (1 - f) / n) + (0 < f < 1) * 2e-5, (f, share)
            assert f != 0 or share == 0


def test_the_mean_over_seeds_is_the_value():
    """Float64 oracle: the mean of 2,000 seeds lies within 5 standard errors of x, each error being that of a coin between the neighbours."""
    x, seeds = values(500), 2000
    total = sum(rounded(x, seed).double() for seed in range(seeds))
    low = (x.view(torch.int32) & -65536).view(torch.float32).double()
    ulp = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32).double() - low
    f = (x.double() - low) / ulp
    z = (total / seeds - x.double()) / (ulp.abs() * (f * (1 - f) / seeds).sqrt()).clamp(min=1e-60)
    z = z[(f > 0.01) & (f < 0.99)]  # where a normal law holds
    print(f"{z.numel()} values: mean error {z.mean():+.3f}, rms {z.square().mean().sqrt():.3f} standard errors, largest {z.abs().max():.2f}")
    assert z.numel() > 400 and z.abs().max() < 5 and abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert 0.85 < float(z.square().mean().sqrt()) < 1.15


def test_bits_are_uniform_and_unlike_from_layer_to_layer_and_from_version_to_version():
    one = random_bits(Rounding(0, 1), "a.q_proj", 256, slice(0, 256)).astype(np.float64)
    assert abs(one.mean() / 65535 - 0.5) < 4 * 0.289 / 256
    others = [random_bits(Rounding(s, v), n, 256, slice(0, 256)) for s, v, n in ((1, 1, "a.q_proj"), (0, 2, "a.q_proj"), (0, 1, "a.k_proj"))]
    for other in others:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / 256
    assert abs(np.corrcoef(one[:, 1:].ravel(), one[:, :-1].ravel())[0, 1]) < 4 / 256  # nor from element to element
    same = random_bits(Rounding(0, 1), "module.a._orig_mod.q_proj", 256, slice(0, 256))
    assert np.array_equal(one, same)  # wrappers do not count


def test_the_recipe_is_fixed():
    """What a trainer and an engine of other versions must agree on."""
    bits = random_bits(Rounding(5, 2), "model.layers.0.mlp.up_proj", 20, slice(1, 3))
    assert bits[:, ::19].tolist() == [[33219, 9303], [56660, 43609]]


@pytest.mark.parametrize("width", [1, 15, 16, 33, 200])
def test_slices_chunks_and_threads_change_no_bit(width, monkeypatch):
    x = torch.randn(37, width, generator=torch.Generator().manual_seed(0))
    whole = rounded(x)
    for rows in (slice(0, 1), slice(5, 20), slice(36, 37)):
        assert torch.equal(rounded(x[rows], first=rows.start), whole[rows])
    columns = slice(width // 3, width // 3 + max(1, width // 2))
    assert torch.equal(rounded(x[4:9, columns], first=4, width=width, columns=columns), whole[4:9, columns])  # a row-parallel slice
    monkeypatch.setattr("logra_core.variants.rounding.CHUNK", 3 * width)
    assert torch.equal(rounded(x), whole) and CHUNK == 2**20
    assert torch.equal(rounded(x.T.contiguous().T), whole)  # whatever the layout
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(rounded(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_edges():
    exact = torch.tensor([[0.0, 1.0, -1.0, 0.15625, LARGEST, -LARGEST, TINY, -TINY, 3.0e38 // 1]]).to(BF16).float()
    odd = torch.tensor([[1.99999, -1.99999, 127.9999, -(2.0 - 2**-23)]])
    seen = set()
    for seed in range(300):
        assert torch.equal(rounded(exact, seed).float(), exact)  # what bf16 can hold stays
        made = rounded(odd, seed).float()
        assert ((made - odd).abs() < odd.abs() * 2**-7).all() and (made.sign() == odd.sign()).all()
        seen |= set(made.flatten().tolist())
    assert {2.0, -2.0, 128.0} <= seen  # a carry goes through the exponent, on either side of zero
    small = torch.tensor([[-0.0, 1e-40, -1e-40, 2**-133]])
    zeros = rounded(small)
    assert torch.equal(zeros.view(torch.int16), torch.zeros(1, 4, dtype=torch.int16))  # +0, as a packed engine would read them
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NonFiniteError, match="'l' is not finite"):
            rounded(torch.tensor([[1.0, bad]]))
    for sign in (1, -1):  # half way to infinity: up in half of the draws, and then refused
        refusals = 0
        for seed in range(40):
            try:
                assert float(rounded(torch.full((1, 1), sign * (LARGEST + 2**119)), seed)) == sign * LARGEST
            except NonFiniteError:
                refusals += 1
        assert 8 <= refusals <= 32
    for bad in ({"seed": -1, "version": 1}, {"seed": 0, "version": 0}, {"seed": True, "version": 1}, {"seed": 0.5, "version": 1}):
        with pytest.raises(ConfigError, match="expected an integer"):
            Rounding(**bad)


@pytest.mark.parametrize("ulps", [0.01, 0.3, 0.5, 1.25])
def test_a_change_of_something_rounded_is_right_in_the_mean(ulps):
    """The values stand on bf16's grid: to nearest, a change below half a unit is lost in every element."""
    y = torch.randn(500, 400, generator=torch.Generator().manual_seed(0)).clamp(1.0, 1.5).to(torch.bfloat16)  # one unit: 2^-7
    change = torch.full_like(y, ulps * 2**-7)
    step = lambda scale, seed=1: add_on_grid(y, change, scale, torch.Generator().manual_seed(seed))  # noqa: E731
    moved, share = (step(-2.0).double() - y.double()) * 2**7, 2 * float(change[0, 0]) * 2**7
    error = math.sqrt((share % 1) * (1 - share % 1) / y.numel())
    assert moved.mean().item() == pytest.approx(-share, abs=4 * error + 1e-9) and torch.equal(step(-2.0), step(-2.0))
    assert torch.equal(step(0.0), y) and torch.equal(y - 2 * change, y) == (ulps < 0.25)
    assert step(math.inf).isinf().all() and step(math.nan).isnan().all()


def test_tiny_steps_are_lost_by_nearest_rounding_and_kept_on_average_by_stochastic():
    """W of N(0, 0.02²), 400 steps of 1 % of an ulp: float64 says where the weights should be."""
    steps, g = 400, torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(64, 256, generator=g)).to(BF16)
    start = torch.where(start.abs() < 1e-3, 1e-3, start)
    ulp = torch.exp2(start.float().abs().log2().floor() - 7)
    step = 0.01 * ulp * torch.randn(64, 256, generator=g).sign()
    target = start.double() + steps * step.double()
    nearest, random = start.clone(), start.clone()
    for t in range(1, steps + 1):
        nearest = (nearest.float() + step).to(BF16)
        random = stochastic_round(random.float() + step, Rounding(0, t), "l")
    intended = steps * step.double()
    ends = {"nearest": nearest, "stochastic": random}
    moved = {n: float(((w.double() - start.double()) * intended).sum() / intended.square().sum()) for n, w in ends.items()}
    error = float((random.double() - target).square().mean().sqrt() / ulp.double().square().mean().sqrt())
    shares = ", ".join(f"{n} {share:.3f}" for n, share in moved.items())
    print(f"share of the intended move after {steps} steps of 0.01 ulp: {shares}; rms error of stochastic {error:.2f} ulp")
    # each step is a coin of probability 0.01: 400 of them have a spread of √(400 · 0.01 · 0.99) = 2 ulp about the 4 intended
    assert moved["nearest"] < 0.02 and abs(moved["stochastic"] - 1) < 4 * (2 / 4) / math.sqrt(step.numel()) + 0.01
    assert 1.7 < error < 2.4


def test_the_kl_of_a_step_is_kept_where_nearest_rounding_loses_half():
    """The real LLM at the paper's update ratio, passes in fp32: the step as stored in bf16 against the step as merged into fp32."""
    exact, tokenizer = real_llm()
    ids = torch.stack([torch.tensor(tokenizer(f"What is {i + 11} plus {i + 42}? It is {2 * i + 53}.").input_ids) for i in range(3)])

    def logp():
        with torch.no_grad():
            return exact(input_ids=ids, use_cache=False).logits.log_softmax(-1)

    def kl(weights) -> float:
        for n, W in weights.items():
            exact.get_submodule(n).weight.data.copy_(W)
        return float((before.exp() * (before - logp())).sum(-1).mean())

    model = copy.deepcopy(exact).to(BF16)
    exact.load_state_dict(model.state_dict())
    before = logp()
    logra = LoGRA(model, SketchConfig(rank=16), OptimConfig(**ON))
    start = {n: t.weight.detach().clone() for n, t in logra.targets.items()}
    policy_loss(model, ids).backward()
    wire = logra.apply(logra.propose())
    merged = {n: W.float() - wire.factors[n].float() @ wire.basis(n) for n, W in start.items()}
    step, stored, nearest = kl(merged), kl({n: t.weight for n, t in logra.targets.items()}), kl({n: W.to(BF16) for n, W in merged.items()})
    print(f"KL of one step: {step:.3e} in fp32; stored in bf16 {stored / step:.3f} of it by stochastic rounding, {nearest / step:.3f} by nearest")
    assert stored == pytest.approx(step, rel=0.1) and nearest < 0.8 * step


# ---------------------------------------------------------------- trainer and replica


def two(switch="one_sided", rank=4, **optim):
    trainer, _ = pair(BF16, switch, rank, **(ON | optim))
    return trainer, Replica(tiny_llama().to(BF16), TARGETS, rounding=Stochastic())


def same(trainer, replica) -> bool:
    return replica.fingerprint() == trainer.weights.fingerprint() and all(
        torch.equal(m.weight.view(torch.int16), trainer.targets[n].weight.view(torch.int16)) for n, m in replica.weights.modules.items()
    )


@pytest.mark.parametrize("switch, wire, rule", [*((s, "bfloat16", "row_adam") for s in SWITCHES), ("two_sided", "float32", "orthogonal")])
def test_updates_over_the_wire_stay_bit_equal_without_a_master(switch, wire, rule):
    trainer, replica = two(switch, wire_dtype=wire, rule=rule)
    start = trainer.weights.fingerprint()
    for t in range(20 if switch == "one_sided" else 4):
        replica.apply(update(trainer, t))
        assert replica.version == trainer.version == t + 1
        assert replica.fingerprint() == trainer.weights.fingerprint()
    assert same(trainer, replica) and trainer.weights.fingerprint() != start
    assert not trainer.weights.masters and not replica.weights.masters
    assert all("master" not in s for s in trainer.state.values())
    assert trainer.weights.fingerprint() == trainer.weights.fingerprint(BF16)  # what is served is what there is


def test_a_merge_is_the_product_that_masters_add_and_one_rounding():
    trainer, _ = two()
    other, _ = pair(BF16)
    for logra in (trainer, other):
        policy_loss(logra.model, random_ids(2, 8, 96)).backward()
    wires = [logra.apply(logra.propose(), 0.7) for logra in (trainer, other)]
    assert [(w.weights, w.seed, w.version) for w in wires] == [("bfloat16", 0, 1), ("masters", 0, 1)]
    for n, target in trainer.targets.items():
        assert torch.equal(wires[0].factors[n], wires[1].factors[n])
        assert torch.equal(target.weight, stochastic_round(other.weights.master(n), Rounding(0, 1), n))


@pytest.fixture(scope="module")
def messages():
    trainer, _ = two()
    sent = [update(trainer, t) for t in range(2)]
    full = full_state_bytes(trainer.weights, trainer.run_id, trainer.version)
    sent += [update(trainer, 2)]
    return {"first": sent[0], "previous": sent[0], "next": sent[1], "after": sent[2], "full": full}


OWN = {
    "another rounding seed": (lambda d: rewrite(d["next"], lambda h: h | {"seed": 1}), "drifted"),
    "no rounding seed": (lambda d: rewrite(d["next"], lambda h: {k: v for k, v in h.items() if k != "seed"}), "malformed header"),
    "a rounding seed that is none": (lambda d: rewrite(d["next"], lambda h: h | {"seed": -3}), "malformed header"),
    "of a trainer with masters": (lambda d: rewrite(d["next"], lambda h: h | {"weights": "masters"}), "the sender has 'masters', this replica 'bfloat16'"),
}


@pytest.mark.parametrize("fault", FAULTS | OWN)
def test_every_fault_is_refused_whole_and_a_resync_heals(fault, messages):
    refused_whole(*(FAULTS | OWN)[fault], messages, lambda: Replica(tiny_llama().to(BF16), TARGETS, rounding=Stochastic()))


def test_who_keeps_masters_refuses_who_does_not_and_the_other_way_round(messages):
    trainer, replica = pair(BF16)
    before = replica.fingerprint()
    for send in (lambda: replica.apply(messages["first"]), lambda: replica.resync(messages["full"])):
        with pytest.raises(SyncError, match="the sender has 'bfloat16', this replica 'masters'"):
            send()
    assert replica.fingerprint() == before and replica.version == 0
    other = Replica(tiny_llama().to(BF16), TARGETS, rounding=Stochastic())
    before = other.fingerprint()
    for send in (lambda: other.apply(update(trainer, 0)), lambda: other.resync(full_state_bytes(trainer.weights, "x", 1))):
        with pytest.raises(SyncError, match="the sender has 'masters', this replica 'bfloat16'"):
            send()
    fp32 = rewrite(messages["full"], None, lambda t: t | {"W." + NAME: t["W." + NAME].float()})
    with pytest.raises(SyncError, match=f"weight not in bfloat16.*{NAME}"):
        other.resync(fp32)
    assert other.fingerprint() == before and other.version == 0


def test_messages_say_how_weights_are_kept(messages):
    seeded, _ = pair(BF16, **ON)
    read = SketchUpdate.from_bytes(messages["next"])
    assert (read.weights, read.seed, read.version) == ("bfloat16", 0, 2)
    plain, _ = pair(BF16)
    assert SketchUpdate.from_bytes(update(plain, 0)).weights == "masters"
    full = full_state_bytes(seeded.weights, "", 0)
    assert len(full) < 0.55 * len(full_state_bytes(plain.weights, "", 0))  # 2 bytes a weight, not 4


def test_a_prepared_message_changes_nothing_and_a_failure_in_the_middle_is_rolled_back(messages, monkeypatch):
    replica = Replica(tiny_llama().to(BF16), TARGETS, rounding=Stochastic())
    with torch.no_grad():
        replica.weights.modules[NAME].weight[0, :3] = torch.tensor([-0.0, 1e-40, 0.5])
    kept = {n: m.weight.clone() for n, m in replica.weights.modules.items()}

    def unchanged():
        bits = ((m.weight.view(torch.int16), kept[n].view(torch.int16)) for n, m in replica.weights.modules.items())
        return replica.version == 0 and all(torch.equal(a, b) for a, b in bits)

    replica.prepare(messages["first"])
    assert unchanged()

    calls = failing_at_the_tenth(monkeypatch, Weights)
    with pytest.raises(MemoryError):
        replica.apply(messages["first"])
    assert len(calls) == 10 and unchanged()
    monkeypatch.undo()
    with pytest.raises(SyncError, match="drifted"):  # 0.5 is not the trainer's
        replica.apply(messages["first"])
    assert unchanged()
    replica.resync(messages["full"])
    replica.apply(messages["after"])
    assert replica.version == 3


def test_a_weight_that_rounds_to_infinity_is_refused_whole(messages):
    """Today's masters would keep it; bf16 cannot. The trainer refuses it before it merges anything."""
    trainer, replica = two()
    policy_loss(trainer.model, random_ids(2, 8, 96)).backward()
    proposed = trainer.propose()
    before = trainer.weights.fingerprint()
    weight = trainer.targets[NAME].weight
    kept = weight[0, 0].clone()
    for bad in (LARGEST, float("nan"), -float("inf")):
        with torch.no_grad():
            weight[0, 0] = bad
        with pytest.raises(NonFiniteError, match=f"{NAME}.*nothing was changed"):
            trainer.apply(proposed)
    with torch.no_grad():
        weight[0, 0] = kept
    assert trainer.version == 0 and trainer.weights.fingerprint() == before
    wire = dataclasses.replace(trainer.apply(proposed), seal=None)
    with torch.no_grad():
        replica.weights.modules[NAME].weight[0].fill_(LARGEST)
    wire.factors[NAME][0] = torch.tensor([2.0**125, 0, 0, 0])  # ± 2^124 in the row: beyond the largest number on one side
    before = replica.fingerprint()
    with pytest.raises(NonFiniteError, match=f"{NAME}.*not finite in bfloat16"):
        replica.apply(wire)
    assert replica.version == 0 and replica.fingerprint() == before


def test_resume_is_bit_for_bit_and_carries_the_switch():
    unbroken, _ = two()
    for t in range(3):
        update(unbroken, t)
    file = io.BytesIO()
    torch.save({"optimizer": unbroken.state_dict(), "model": unbroken.model.state_dict()}, file)
    rest = [update(unbroken, t) for t in range(3, 6)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["logra"]["optim"]["stochastic_rounding"] is True
    resumed = LoGRA(tiny_llama(seed=9).to(BF16), unbroken.config, OptimConfig(update_ratio=1e-2, **ON))
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert [update(resumed, t) for t in range(3, 6)] == rest  # messages and, with them, digests of the weights
    plain, _ = pair(BF16)
    with pytest.raises(ConfigError, match="stochastic_rounding: saved True, here False"):
        plain.load_state_dict(saved["optimizer"])
    with pytest.raises(ConfigError, match="stochastic_rounding: saved False, here True"):
        resumed.load_state_dict(plain.state_dict())
    older = copy.deepcopy(plain.state_dict())
    del older["param_groups"][0]["logra"]["optim"]["stochastic_rounding"]
    plain.load_state_dict(older)  # of before there was the switch
    assert plain.param_groups[0]["logra"]["optim"]["stochastic_rounding"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_bf16_are_refused_with_nothing_changed(dtype):
    model = tiny_llama().to(dtype)
    with pytest.raises(ConfigError, match=f"allowed with bfloat16 weights only, but 21 of 21 are not .*q_proj' is {str(dtype)[6:]}"):
        LoGRA(model, SketchConfig(rank=4), OptimConfig(**ON))
    assert all(p.requires_grad for p in model.parameters()) and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ConfigError, match="bfloat16 weights only"):
        Replica(model, TARGETS, rounding=Stochastic())
    LoGRA(model, SketchConfig(rank=4))  # without the switch it is taken


def test_settings_that_do_not_go_together_are_refused():
    for other, field in (({"method": "dense"}, "method"), ({"compute_dtype": "float32"}, "compute_dtype")):
        with pytest.raises(ConfigError, match=f"TrainConfig.{field} = .*where optim.stochastic_rounding is true"):
            TrainConfig(**({"compute_dtype": "bfloat16", "optim": OptimConfig(**ON)} | other))
    trainer, _ = two()
    with pytest.raises(ConfigError, match="no fp32 master"):
        trainer.weights.merge_(NAME, torch.zeros(16, 4), torch.zeros(4, 32))
    with pytest.raises(ConfigError, match="expected torch.bfloat16"):
        trainer.weights.set_(NAME, torch.zeros(16, 32))
    assert isinstance(pair()[0].weights, Weights) and OptimConfig().stochastic_rounding is False


def test_what_is_not_finite_stays_so_on_the_grid():
    """Also a GPU's NaN, which no sum on a CPU gives."""
    y = torch.tensor([0x7FFF, -1, 0x7F80, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    made = add_on_grid(y, torch.zeros_like(y), 1.0, torch.Generator().manual_seed(0))
    assert not torch.isfinite(made).any()
    values = torch.tensor([0x7FFFFFFF, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    for low in (0, 1, 0xFFFF):
        assert not torch.isfinite(cut_or_nan(values, torch.full((3,), low, dtype=torch.int32))).any()
