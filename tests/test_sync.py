"""Two policies kept in step by bytes alone; every fault is refused whole, and a full resync heals."""

import dataclasses
import json

import pytest
import torch
from models import SWITCHES, policy_loss, random_ids, real_llm, score, tiny_llama
from safetensors.torch import load, save

from logra_core import LoGRA, Replica, SketchUpdate, SyncError, full_state_bytes
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.weights import Tensors, Weights

TARGETS = SketchConfig().targets


def pair(dtype=torch.float32, switch="one_sided", rank=4, distribution="rademacher", **optim):
    config = SketchConfig(**({"rank": rank, "distribution": distribution} | SWITCHES[switch]))
    trainer = LoGRA(tiny_llama().to(dtype), config, OptimConfig(**({"update_ratio": 1e-2} | optim)))
    return trainer, Replica(tiny_llama().to(dtype), TARGETS)


def update(trainer, t, alpha=0.7) -> bytes:
    score(trainer, random_ids(2, 8, 96, t))
    policy_loss(trainer.model, random_ids(2, 8, 96, t), t).backward()
    wire = trainer.apply(trainer.propose(), alpha)
    return wire.to_bytes(trainer.weights.fingerprint())


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "orthonormal", "coordinates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_twenty_updates_stay_bit_equal(distribution, dtype, wire):
    twenty_updates(*pair(dtype, distribution=distribution, wire_dtype=wire))


@pytest.mark.parametrize("dtype, rule, wire", [(torch.float32, "row_adam", "bfloat16"), (torch.bfloat16, "orthogonal", "float32")])
@pytest.mark.parametrize("switch", [s for s in SWITCHES if s != "one_sided"])
def test_twenty_updates_of_every_switch_stay_bit_equal(switch, dtype, rule, wire):
    twenty_updates(*pair(dtype, switch, wire_dtype=wire, rule=rule))


def twenty_updates(trainer, replica):
    start = trainer.weights.fingerprint()
    for t in range(20):
        replica.apply(update(trainer, t))
        assert replica.fingerprint() == trainer.weights.fingerprint() and replica.version == trainer.version == t + 1
    assert trainer.weights.fingerprint() != start
    for n, module in replica.weights.modules.items():
        assert torch.equal(module.weight, trainer.targets[n].weight)


def test_twenty_real_updates_of_the_real_llm():
    model, _ = real_llm()
    other, _ = real_llm()
    trainer, replica = LoGRA(model, SketchConfig(rank=64), OptimConfig(update_ratio=1e-4)), Replica(other, TARGETS)
    for t in range(20):
        policy_loss(model, random_ids(1, 12, 49152, t), t).backward()
        wire = trainer.apply(trainer.propose(), 0.9)
        data = wire.to_bytes(trainer.weights.fingerprint())
        replica.apply(data)
    assert replica.fingerprint() == trainer.weights.fingerprint() and replica.version == 20
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    formula = sum(2 * 64 * t.module.out_features for t in trainer.targets.values())
    print(f"payload {formula:,} bytes by the formula, {len(data):,} on the wire, {len(full_state_bytes(trainer.weights, '', 0)):,} in full")
    assert wire.payload_bytes() == formula and formula <= len(data) <= 1.01 * formula


def rewrite(data: bytes, edit=None, tensors=None) -> bytes:
    """A message changed and signed again, as a faulty sender would."""
    from logra_core.sync import _pack

    length = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["logra"])
    header.pop("digest")
    content = load(data)
    return _pack(edit(header) if edit else header, tensors(content) if tensors else content)


NAME = "model.layers.1.self_attn.k_proj"
FAULTS = {
    "repeated": (lambda d: d["previous"], "repeated or out of order"),
    "dropped": (lambda d: d["after"], "an earlier one was dropped"),
    "empty": (lambda d: b"", "not a whole LoGRA message"),
    "text": (lambda d: b"hello, this is not an update", "not a whole LoGRA message"),
    "truncated header": (lambda d: d["next"][:100], "not a whole LoGRA message"),
    "truncated data": (lambda d: d["next"][:-1], "not a whole LoGRA message"),
    "one bit of a factor": (lambda d: d["next"][:-7] + bytes([d["next"][-7] ^ 1]) + d["next"][-6:], "corrupted on the way"),
    "one character of the header": (lambda d: d["next"].replace(b'\\"version\\": 2', b'\\"version\\": 3', 1), "corrupted on the way"),
    "foreign safetensors": (lambda d: save({"x": torch.ones(2)}), "not a whole LoGRA message"),
    "another run": (lambda d: rewrite(d["next"], lambda h: h | {"run_id": "other"}), "follows run"),
    "another format": (lambda d: rewrite(d["next"], lambda h: h | {"format": 99}), "format 99"),
    "full state as update": (lambda d: d["full"], "kind 'full'"),
    "header without widths": (lambda d: rewrite(d["next"], lambda h: {k: v for k, v in h.items() if k != "widths"}), "malformed header"),
    "another A": (lambda d: rewrite(d["next"], lambda h: h | {"draw": [[5, 1, "rademacher"]]}), "not the same A"),
    "a layer missing": (lambda d: rewrite(d["next"], None, lambda t: {n: v for n, v in t.items() if n != "U." + NAME}), "different layers: " + NAME),
    "a layer unknown": (lambda d: rewrite(d["next"], None, lambda t: t | {"U.model.layers.9.x": torch.ones(2, 4)}), "different layers: model.layers.9.x"),
    "a wrong shape": (lambda d: rewrite(d["next"], None, lambda t: t | {"U." + NAME: t["U." + NAME][:-1]}), "wrong shape"),
    "NaN in a factor": (lambda d: rewrite(d["next"], None, lambda t: t | {"U." + NAME: t["U." + NAME] * float("nan")}), "not finite"),
    "integers as factor": (lambda d: rewrite(d["next"], None, lambda t: t | {"U." + NAME: t["U." + NAME].int()}), "not finite"),
    "factors of two layers swapped": (
        lambda d: rewrite(d["next"], None, lambda t: t | {"U." + NAME: t["U.model.layers.2.self_attn.k_proj"], "U.model.layers.2.self_attn.k_proj": t["U." + NAME]}),
        "drifted",
    ),
}  # fmt: skip


FIRST, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
OTHER = "model.layers.2.self_attn.q_proj"


def basis(change):
    """The next message with one V changed."""
    return lambda d: rewrite(d["next"], None, lambda t: t | {"V." + FIRST: change(t["V." + FIRST])})


BY_VALUE = {
    "NaN in a basis": (basis(lambda V: V * float("nan")), "basis not finite"),
    "a basis of the wrong width": (basis(lambda V: V[:, :-1]), "basis of the wrong shape"),
    "a basis of another rank": (basis(lambda V: V[:-1]), "factor of the wrong shape"),
    "a basis that is no matrix": (basis(torch.flatten), "wrong shape"),
    "a basis of an unknown layer": (lambda d: rewrite(d["next"], None, lambda t: t | {"V.model.layers.9.x": torch.ones(2, 4)}), "different layers: model.layers.9.x"),
    "a basis missing": (lambda d: rewrite(d["next"], None, lambda t: {n: v for n, v in t.items() if n != "V." + DOWN}), "different layers: " + DOWN),
    "a basis like no other": (lambda d: rewrite(d["next"], lambda h: h | {"same_basis": {NAME: "model.layers.9.x"}}), "malformed header"),
    "no word of shared bases": (lambda d: rewrite(d["next"], lambda h: {k: v for k, v in h.items() if k != "same_basis"}), "malformed header"),
    "bases of two layers swapped": (
        lambda d: rewrite(d["next"], None, lambda t: t | {"V." + FIRST: t["V." + OTHER], "V." + OTHER: t["V." + FIRST]}), "drifted",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["two_sided", "shared activation"])
def by_value(request):
    return four_messages(request.param)


@pytest.mark.parametrize("fault", [f for f in (FAULTS | BY_VALUE) if f != "another A"])
def test_every_fault_of_a_message_with_factors_by_value_is_refused_whole(fault, by_value):
    refused_whole(*(FAULTS | BY_VALUE)[fault], by_value)


@pytest.fixture(scope="module")
def messages():
    return four_messages("one_sided")


def four_messages(switch):
    """One trainer's first four messages, and the states around the second."""
    trainer, _ = pair(switch=switch)
    sent = [update(trainer, t) for t in range(2)]
    full = full_state_bytes(trainer.weights, trainer.run_id, trainer.version)
    sent += [update(trainer, t) for t in range(2, 4)]
    return {"first": sent[0], "previous": sent[0], "next": sent[1], "after": sent[2], "full": full}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_refused_whole_and_a_resync_heals(fault, messages):
    refused_whole(*FAULTS[fault], messages)


def refused_whole(make, words, messages, fresh=lambda: Replica(tiny_llama(), TARGETS)):
    replica = fresh()
    replica.apply(messages["first"])
    before = replica.fingerprint(), replica.version, replica.run_id
    with pytest.raises(SyncError, match=words):
        replica.apply(make(messages))
    assert (replica.fingerprint(), replica.version, replica.run_id) == before
    replica.resync(messages["full"])  # version 2
    replica.apply(messages["after"])  # and on with version 3
    assert replica.version == 3


def test_swapped_messages_are_refused_and_the_right_order_still_works(messages):
    replica = Replica(tiny_llama(), TARGETS)
    with pytest.raises(SyncError, match="dropped"):
        replica.apply(messages["next"])
    replica.apply(messages["first"])
    replica.apply(messages["next"])
    assert replica.version == 2


def failing_at_the_tenth(monkeypatch, kind) -> list:
    """Merges of `kind` raise after the tenth layer has changed; the list grows by one a merge."""
    calls, merge = [], kind.merge_

    def fails_at_the_tenth(self, *args):
        calls.append(1)
        merge(self, *args)
        if len(calls) == 10:
            raise MemoryError("out of memory")

    monkeypatch.setattr(kind, "merge_", fails_at_the_tenth)
    return calls


def test_a_failure_in_the_middle_of_the_commit_is_rolled_back(messages, monkeypatch):
    replica = Replica(tiny_llama(), TARGETS)
    before, calls = replica.fingerprint(), failing_at_the_tenth(monkeypatch, Weights)
    with pytest.raises(MemoryError):
        replica.apply(messages["first"])
    assert len(calls) == 10 and replica.fingerprint() == before and replica.version == 0
    monkeypatch.undo()
    replica.apply(messages["first"])
    assert replica.version == 1 and replica.fingerprint() != before


def test_drift_is_found_and_healed(messages):
    replica = Replica(tiny_llama(), TARGETS)
    with torch.no_grad():
        replica.weights.modules[NAME].weight[0, 0] += 1e-6
    drifted = replica.fingerprint()
    with pytest.raises(SyncError, match="drifted"):
        replica.apply(messages["first"])
    assert replica.fingerprint() == drifted and replica.version == 0
    replica.resync(messages["full"])
    replica.apply(messages["after"])


def test_a_damaged_resync_is_refused_whole(messages):
    replica = Replica(tiny_llama(), TARGETS)
    before = replica.fingerprint()
    damaged = messages["full"][:-5] + b"\x01" + messages["full"][-4:]
    for data, words in ((damaged, "corrupted"), (messages["full"][:-1], "not a whole"), (messages["next"], "kind 'update'")):
        with pytest.raises(SyncError, match=words):
            replica.resync(data)
    other = LoGRA(tiny_llama(num_hidden_layers=2), SketchConfig(rank=4))
    with pytest.raises(SyncError, match="missing"):
        replica.resync(full_state_bytes(other.weights, other.run_id, 0))
    assert replica.fingerprint() == before and replica.version == 0


def test_only_what_apply_returned_can_be_sent():
    trainer, replica = pair()
    policy_loss(trainer.model, random_ids(2, 8, 96)).backward()
    proposal = trainer.propose()
    with pytest.raises(SyncError, match="rounded"):
        proposal.to_bytes()
    with pytest.raises(SyncError, match="never scaled"):
        replica.apply(proposal)
    wire = trainer.apply(proposal, 0.5)
    with pytest.raises(SyncError, match="already"):
        wire.scaled(0.5, torch.bfloat16)
    replica.apply(wire)  # in the same process no bytes are needed
    assert replica.fingerprint() == trainer.weights.fingerprint()


def test_bases_by_value_travel_too():
    """An update whose V no seed gives (room for two-sided and activation-aware sketches)."""
    trainer, replica = pair()
    policy_loss(trainer.model, random_ids(2, 8, 96)).backward()
    wire = trainer.apply(trainer.propose())
    by_value = dataclasses.replace(wire, bases=wire.bases | {n: wire.basis(n) for n in list(wire.factors)[:4]})
    data = by_value.to_bytes(trainer.weights.fingerprint())
    assert set(SketchUpdate.from_bytes(data).by_value) == set(list(wire.factors)[:4])
    replica.apply(data)
    assert replica.fingerprint() == trainer.weights.fingerprint()


def test_fingerprint_sees_one_bit():
    model = tiny_llama()
    replica = Replica(model, TARGETS)
    before = replica.fingerprint()
    weight = replica.weights.modules[NAME].weight.data
    weight.view(torch.int32)[3, 3] ^= 1
    assert replica.fingerprint() != before
    weight.view(torch.int32)[3, 3] ^= 1
    assert replica.fingerprint() == before


class Published(Tensors):
    """Weights whose publication can be told to fail, and which keep what was published last."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.fail, self.shown = False, None

    def publish(self):
        if self.fail:
            self.fail = False
            raise RuntimeError("the engine refused the weights")
        self.shown = Weights(self.tensors).fingerprint()


def test_masters_without_modules_follow_and_a_failed_publication_puts_everything_back():
    trainer, model_replica = pair()
    masters = Published({n: t.weight.detach().clone() for n, t in trainer.targets.items()})
    replica = Replica(Weights(masters))
    for t in range(3):
        data = update(trainer, t)
        replica.apply(data)
        model_replica.apply(data)
        assert replica.fingerprint() == model_replica.fingerprint() == trainer.weights.fingerprint() == masters.shown
    before, data, masters.fail = masters.shown, update(trainer, 3), True
    with pytest.raises(RuntimeError, match="refused the weights"):
        replica.apply(data)
    assert replica.fingerprint() == before == masters.shown and replica.version == 3
    replica.apply(data)  # the same message goes through when the engine takes it
    assert masters.shown == trainer.weights.fingerprint() and replica.version == 4


def test_a_prepared_message_changes_nothing_until_committed_and_commits_once():
    trainer, replica = pair()
    before = replica.fingerprint()
    commit = replica.prepare(update(trainer, 0))
    assert replica.fingerprint() == before and replica.version == 0
    commit()
    assert replica.fingerprint() == trainer.weights.fingerprint() and replica.version == 1
    with pytest.raises(SyncError, match="repeated"):
        commit()


def test_the_products_precision_of_one_side_is_none_of_the_others():
    """A trainer with TF32 or bf16 products, a replica without: the merges are in full fp32 on both."""
    changes = dict(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    trainer = LoGRA(tiny_llama(**changes), SketchConfig(rank=256), OptimConfig(update_ratio=1e-3))
    replica, before = Replica(tiny_llama(**changes), TARGETS), torch.get_float32_matmul_precision()
    policy_loss(trainer.model, random_ids(2, 10, 96)).backward()
    proposed = trainer.propose()
    try:
        torch.set_float32_matmul_precision("medium")
        used = torch.backends.mkldnn.matmul.fp32_precision
        wire = trainer.apply(proposed).to_bytes(trainer.weights.fingerprint())
        assert torch.backends.mkldnn.matmul.fp32_precision == used != "ieee"  # put back
    finally:
        torch.set_float32_matmul_precision(before)
    replica.apply(wire)
    assert replica.fingerprint() == trainer.weights.fingerprint()
