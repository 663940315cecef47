"""The logra backend on a real vLLM with the real LLM: served bits, answers, refusals. One engine for the module, a second one to compare.

The tests run in the order written: each leaves the engine in step with the trainer.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import policy_loss, random_ids, real_llm
from safetensors.torch import save_file

from logra_core import LoGRA, SyncError, full_state_bytes
from logra_core.engines.rollout import SamplingConfig
from logra_core.rl.ppo import sequence_logprobs
from logra_core.variants import OptimConfig, SketchConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm")

RANK, UPDATES, GREEDY = 64, 20, SamplingConfig(max_tokens=24, temperature=0.0)
OPTIONS = {"max_model_len": 1024, "worker_extension_cls": "logra_core.engines.faults.FaultyWorker"}


def next_update(run) -> bytes:
    """One real LoGRA update of the trainer; the message."""
    seed = run.logra.version
    policy_loss(run.logra.model, random_ids(1, 12, 49152, seed), seed).backward()
    run.wire = run.logra.apply(run.logra.propose(), 0.9)
    return run.wire.to_bytes(run.logra.weights.fingerprint())


def full(run) -> bytes:
    return full_state_bytes(run.logra.weights, run.logra.run_id, run.logra.version)


def status(run) -> dict:
    return run.engine._status("served")


def in_step(run) -> bool:
    """The worker's masters are the trainer's, and what it serves is exactly their rounding."""
    seen, weights = status(run), run.logra.weights
    return (seen["version"], seen["run_id"], seen["fingerprint"], seen["served"], seen["consistent"]) == (
        run.logra.version, run.logra.run_id, weights.fingerprint(), weights.fingerprint(torch.bfloat16), True,
    )  # fmt: skip


def prompts(tokenizer, count: int, repeat: int = 1) -> list[list[int]]:
    chats = [[{"role": "user", "content": f"What is {3 * i + 11} plus {7 * i + 2}? Think about it. " * repeat}] for i in range(count)]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False) for c in chats]


def rpc(run, method: str, *args):
    return run.engine.llm.collective_rpc(method, args=args)[0]


@pytest.fixture(scope="module")
def run():
    """The engine, a trainer, and what 20 updates between them took."""
    from logra_core.engines.policy import embedded_policy
    from logra_core.engines.vllm_local import VLLMRollout

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
        engine = VLLMRollout(embedded_policy(), **OPTIONS)
        model, tokenizer = real_llm()
        run = SimpleNamespace(engine=engine, tokenizer=tokenizer, logra=LoGRA(model, SketchConfig(rank=RANK), OptimConfig(update_ratio=1e-4)))
        yield run
        engine.close()


def test_an_update_before_the_first_resync_is_refused(run):
    assert status(run) == {"run_id": None, "version": 0, "layers": 0, "consistent": True}
    first = next_update(run)
    with pytest.raises(SyncError, match="no fp32 masters yet"):
        run.engine.sync(first)
    assert status(run)["version"] == 0
    run.engine.resync(full(run))
    assert in_step(run) and run.engine.version == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads matter on a CPU")
def test_the_worker_computes_on_every_core(run):
    assert rpc(run, "probe_threads") == len({Path(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list").read_text() for i in os.sched_getaffinity(0)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's generators have no offset to go back to")
def test_seeded_requests_whose_prompts_do_not_fit_into_one_step(run):
    asked = prompts(run.tokenizer, 64, repeat=5)
    assert sum(map(len, asked)) > run.engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    first, again = (run.engine.generate(asked, SamplingConfig(max_tokens=2, temperature=1.0), 3) for _ in range(2))
    assert len(first.response_ids) == 64 and all(map(torch.equal, first.response_ids, again.response_ids))


def test_twenty_updates_are_served_bit_for_bit(run, tmp_path):
    # A long prompt (several blocks of keys and values) is answered first, so that its cache could go stale; see the next test.
    run.long = prompts(run.tokenizer, 2, repeat=40)
    assert min(map(len, run.long)) > 256
    run.before = run.engine.generate(run.long, GREEDY, 0)
    start, sync, dense = run.logra.weights.fingerprint(), [], []
    for _ in range(UPDATES):
        message = next_update(run)
        began = time.perf_counter()
        run.engine.sync(message)
        sync.append(time.perf_counter() - began)
    assert in_step(run) and run.logra.weights.fingerprint() != start
    for _ in range(3):
        data = full(run)
        began = time.perf_counter()
        run.engine.resync(data)
        dense.append(time.perf_counter() - began)
    assert in_step(run)
    masters = run.logra.weights
    save_file({n: masters.master(n).to(torch.bfloat16) for n in masters.shapes}, tmp_path / "rounded.safetensors")
    assert rpc(run, "probe_served", str(tmp_path / "rounded.safetensors")) == {"layers": 210, "names": True, "differ": []}
    formula = sum(2 * RANK * d for d, _ in masters.shapes.values())
    assert run.wire.payload_bytes() == formula and formula <= len(message) <= 1.01 * formula
    print(f"sync: {statistics.median(sync):.3f} s and {len(message):,} bytes (formula {formula:,}); dense reload: {statistics.median(dense):.3f} s and {len(data):,} bytes")


def held(engine, asked: list[list[int]]) -> list:
    """Greedy answers to requests that start together, without the reset of the cache that `generate` makes."""
    engine.llm.sleep(level=0)
    engine.llm.enqueue([{"prompt_token_ids": p} for p in asked], [engine._params(**engine._sampling(GREEDY, 0, i)) for i in range(len(asked))], use_tqdm=False)
    engine.llm.wake_up(tags=["scheduling"])
    return [o.outputs[0] for o in engine.llm.wait_for_completion(use_tqdm=False)]


def test_answers_equal_those_of_a_fresh_engine_from_the_trainers_checkpoint(run, tmp_path):
    from logra_core.engines.vllm_local import VLLMRollout

    run.logra.model.save_pretrained(tmp_path)
    run.tokenizer.save_pretrained(tmp_path)
    short, sampled = prompts(run.tokenizer, 8), SamplingConfig(max_tokens=24, temperature=1.0)
    fresh = VLLMRollout(tmp_path, **OPTIONS)
    try:
        # The long prompt was last answered before the updates: they must have dropped its keys and values.
        for a, b in zip(held(run.engine, run.long), held(fresh, run.long), strict=True):
            assert list(a.token_ids) == list(b.token_ids) and a.cumulative_logprob == b.cumulative_logprob
        for asked, sampling in ((short, GREEDY), (short, sampled), (run.long, GREEDY)):
            ours, theirs = (e.generate(asked, sampling, 5) for e in (run.engine, fresh))
            assert ours.texts == theirs.texts and ours.finish_reasons == theirs.finish_reasons
            assert max(float((a - b).abs().max()) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) == 0
        after = run.engine.generate(run.long, GREEDY, 0)
        assert any(not torch.equal(a, b) for a, b in zip(run.before.logprobs, after.logprobs))  # the updates did move the answers
    finally:
        fresh.close()


def test_logprobs_are_close_to_the_fp32_trainer(run):
    made = run.engine.generate(prompts(run.tokenizer, 8), SamplingConfig(max_tokens=24, temperature=0.7), 3, expected_version=run.logra.version)
    padded = made.padded(run.tokenizer.pad_token_id)
    with torch.no_grad():
        trained = sequence_logprobs(run.logra.model, padded, temperature=0.7)
    gap = (trained - padded["rollout_logprobs"])[padded["response_mask"]].abs()
    print(f"mean |log-prob difference| to the fp32 trainer: {gap.mean():.4f} over {made.tokens} tokens")
    assert gap.mean() < 0.1  # bf16 rounding; the raw log-probs (temperature 1) would be off by several tenths


def test_the_same_seed_gives_the_same_rollouts_and_another_seed_others(run):
    ask = prompts(run.tokenizer, 8)
    sampling = SamplingConfig(max_tokens=16, temperature=1.0)
    first, again, other = (run.engine.generate(ask, sampling, seed) for seed in (7, 7, 8))
    assert first.texts == again.texts and first.texts != other.texts
    assert all(torch.equal(a, b) for a, b in zip(first.logprobs, again.logprobs, strict=True))
    assert first.version == run.logra.version and set(first.finish_reasons) <= {"stop", "length"}
    with pytest.raises(SyncError, match="an update was missed"):
        run.engine.generate(ask, sampling, 7, expected_version=run.logra.version + 1)


def flipped(data: bytes) -> bytes:
    at = len(data) - 1000
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def foreign() -> bytes:
    """The first update of another trainer."""
    other = SimpleNamespace(logra=LoGRA(real_llm()[0], SketchConfig(rank=RANK), OptimConfig(update_ratio=1e-4)))
    return next_update(other)


FAULTS = {
    # name: (what to send, given the next message and the one after; what the refusal says)
    "dropped": (lambda run, one, two: two, "an earlier one was dropped"),
    "repeated": (lambda run, one, two: run.last, "repeated or out of order"),
    "truncated": (lambda run, one, two: one[: len(one) // 2], "not a whole LoGRA message"),
    "corrupted": (lambda run, one, two: flipped(one), "corrupted on the way"),
    "of another run": (lambda run, one, two: foreign(), "but this replica follows run"),
}


def refused(run, send, says: str) -> None:
    """`send` raises within seconds, and the engine's masters, served weights and version are what they were."""
    before, began = status(run), time.perf_counter()
    with pytest.raises(SyncError, match=says):
        send()
    assert time.perf_counter() - began < 30 and status(run) == before


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_message_is_refused_whole_and_the_right_one_still_goes_through(run, name):
    send, says = FAULTS[name]
    run.last = next_update(run)
    run.engine.sync(run.last)
    one = next_update(run)
    two = next_update(run)
    refused(run, lambda: run.engine.sync(send(run, one, two)), says)
    run.engine.sync(one)
    run.engine.sync(two)
    assert in_step(run)


def test_two_swapped_messages_are_both_refused_and_a_resync_heals(run):
    one, two = next_update(run), next_update(run)
    refused(run, lambda: run.engine.sync(two), "an earlier one was dropped")
    run.engine.sync(one)
    refused(run, lambda: run.engine.sync(one), "repeated or out of order")
    run.engine.resync(full(run))
    assert in_step(run)


@pytest.mark.parametrize("module", [0, 1, 119])
def test_a_worker_that_raises_in_the_middle_is_rolled_back(run, module):
    message = next_update(run)
    rpc(run, "probe_fail_at", module)
    refused(run, lambda: run.engine.sync(message), "worker failed at model.layers")
    run.engine.sync(message)
    assert in_step(run)


def test_a_drifted_master_is_found_and_a_resync_heals(run):
    rpc(run, "probe_drift", "model.layers.7.mlp.up_proj")
    message = next_update(run)
    refused(run, lambda: run.engine.sync(message), "the copies had drifted")
    run.engine.resync(full(run))
    assert in_step(run)


def test_weights_that_do_not_train_are_watched(run):
    message = next_update(run)
    rpc(run, "probe_norm", 2.0)
    refused(run, lambda: run.engine.sync(message), r"weights that do not train have changed .*model\.norm\.weight")
    refused(run, lambda: run.engine.resync(full(run)), "start it again")
    rpc(run, "probe_norm", 0.5)
    run.engine.sync(message)
    assert in_step(run)


def test_a_sleeping_engine_is_refused_and_goes_on_after_waking(run):
    message = next_update(run)
    run.engine.llm.sleep(level=1)
    refused(run, lambda: run.engine.sync(message), "sleeps or is paused")
    run.engine.llm.wake_up()
    run.engine.sync(message)
    assert in_step(run)


def test_sessions_of_the_protocol(run):
    client, message = run.engine.sender.client, next_update(run)

    def after_start(*infos):
        client.start_weight_update()
        for info in infos:
            client.update_weights(info)
        client.finish_weight_update()

    info = {"kind": "update", "payload": message}
    for infos, says in (
        ((), "no message arrived"), ((info, info), "a second message"), (({"kind": "delta", "payload": b""},), "allowed is one of"),
        (({"kind": "update"},), "either payload or path"), (({"kind": "update", "payload": "no base64!"},), "cannot be read"),
    ):  # fmt: skip
        before = status(run)
        with pytest.raises(Exception, match=says):
            after_start(*infos)
        run.engine.sender.abort()
        assert status(run) == before
    client.start_weight_update()  # a sender that died here leaves the session open; the next one ends it and goes on
    client.update_weights(info)
    run.engine.sync(message)
    assert in_step(run)


def test_layers_that_vllm_does_not_have_are_refused_by_name(run):
    masters = run.logra.weights
    weights = {n: masters.master(n) for n in masters.shapes}
    from logra_core.weights import Weights

    unknown = Weights(weights | {"model.layers.99.mlp.up_proj": weights["model.layers.0.mlp.up_proj"].clone()})
    refused(run, lambda: run.engine.resync(full_state_bytes(unknown, run.logra.run_id, 0)), r"model\.layers\.99\.mlp\.up_proj \(not there\)")
    wrong = Weights(weights | {"model.embed_tokens": weights["model.layers.0.mlp.up_proj"].clone()})
    refused(run, lambda: run.engine.resync(full_state_bytes(wrong, run.logra.run_id, 0)), "model.embed_tokens is VocabParallelEmbedding")


def test_a_trainer_without_masters_is_followed_without_masters(run, tmp_path):
    """The same engine: a run of bf16 weights with stochastic rounding takes over, is followed bit for bit, and hands back."""
    targets = sum(d * k for d, k in run.logra.weights.shapes.values())
    assert rpc(run, "probe_kept") == 4 * targets
    optim = OptimConfig(update_ratio=1e-4, stochastic_rounding=True)
    other = SimpleNamespace(engine=run.engine, logra=LoGRA(real_llm()[0].to(torch.bfloat16), SketchConfig(rank=RANK), optim))
    data = full(other)
    assert len(data) < 1.01 * 2 * targets
    run.engine.resync(data)
    last = next_update(other)
    run.engine.sync(last)
    assert in_step(other) and rpc(run, "probe_kept") == 0
    save_file({n: other.logra.weights.stored(n) for n in other.logra.targets}, tmp_path / "weights.safetensors")
    assert rpc(run, "probe_served", str(tmp_path / "weights.safetensors")) == {"layers": 210, "names": True, "differ": []}
    message = next_update(other)
    refused(run, lambda: run.engine.sync(last), "repeated or out of order")
    rpc(run, "probe_fail_at", 119)
    refused(run, lambda: run.engine.sync(message), "worker failed at model.layers")
    run.engine.sync(message)
    assert in_step(other) and run.engine.generate(prompts(run.tokenizer, 1), GREEDY, 0).version == 2
    run.engine.resync(full(run))
    assert in_step(run) and rpc(run, "probe_kept") == 4 * targets


def test_requests_in_flight_are_refused_and_end_on_the_old_weights(run):
    llm, (long,) = run.engine.llm, prompts(run.tokenizer, 1)
    alone = held(run.engine, [long])[0]
    message = next_update(run)
    llm.sleep(level=0)
    llm.enqueue([{"prompt_token_ids": long}], [run.engine._params(**run.engine._sampling(GREEDY, 0, 0))], use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    refused(run, lambda: run.engine.sync(message), "1 request is not finished")
    (late,) = llm.wait_for_completion(use_tqdm=False)
    assert list(late.outputs[0].token_ids) == list(alone.token_ids) and late.outputs[0].cumulative_logprob == alone.cumulative_logprob
    run.engine.sync(message)
    assert in_step(run)


def test_a_worker_killed_in_the_middle_of_a_commit_is_reported_within_bounded_time(run):
    """Last: the engine is gone afterwards."""
    message = next_update(run)
    rpc(run, "probe_fail_at", 60, True)
    for _ in range(2):
        began = time.perf_counter()
        with pytest.raises(SyncError):
            run.engine.sync(message)
        assert time.perf_counter() - began < 60
