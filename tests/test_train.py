"""train.py: the loop on a tiny policy, row by row; learning; refusals; settings from files."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from models import SWITCHES
from tiny import tiny_policy

from logra_core.engines.rollout import RolloutError, Rollouts, SamplingConfig, shared_prefix
from logra_core.optim import NonFiniteError
from logra_core.rl import checkpoint
from logra_core.rl.configfile import from_dict, load_config
from logra_core.rl.evaluation import held_out
from logra_core.rl.methods import dense_lr
from logra_core.rl.runlog import read_log
from logra_core.rl.settings import TrainConfig
from logra_core.rl.tasks import Grade, Problem
from logra_core.rl.train import main
from logra_core.rl.trainer import Trainer, derive_seed
from logra_core.settings import ConfigError, to_dict
from logra_core.sync import SyncError

VARIANTS = ["logra", "dense", "controlled", "lora", "galore"]
INEXACT = ("seconds", "elapsed", "peak_rss_mib")


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def settings(policy, out, **changes) -> TrainConfig:
    values = {
        "model": str(policy), "out": str(out), "updates": 4, "eval_problems": 6, "eval_samples": 2, "eval_every": 2, "checkpoint_every": 2,
        "threads": 1, "exact_kl_every": 1, "sampling": {"max_tokens": 6},
        "eval_sampling": {"max_tokens": 6, "temperature": 0.7, "top_p": 0.7},
        "task": {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}},
        "sketch": {"rank": 8}, "optim": {"update_ratio": 1e-2}, "kl": {"schedule": "constant", "budget": 5e-3},
        "ppo": {"prompts_per_update": 10, "microbatch": 4}, "dense": {"lr": 1e-3, "warmup": 0},
        "lora": {"lr": 1e-2, "warmup": 0, "rank": 8, "alpha": 8.0}, "galore": {"lr": 1e-2, "warmup": 0, "rank": 8, "update_proj_gap": 3},
    }  # fmt: skip
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    return from_dict(TrainConfig, values)


def variant(method: str) -> dict:
    """Settings of a method of the tests: its name, or `controlled` for dense AdamW under KL control."""
    return {"method": "dense", "dense": {"kl_control": True, "lr": 1e-2}} if method == "controlled" else {"method": method}


def exact(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in INEXACT}


def first_digit(trainer: Trainer) -> None:
    """A reward that a tiny policy can learn: the response begins with a digit."""
    trainer.task.grade = lambda texts, problems: [Grade(t[:1].isdigit(), "correct" if t[:1].isdigit() else "wrong") for t in texts]


def run(cfg, prepare=lambda trainer: None):
    trainer = Trainer(cfg)
    prepare(trainer)
    return trainer, trainer.run(), *read_log(f"{cfg.out}/log.jsonl")


def test_an_evaluation_of_a_mixture_has_the_mean_over_tasks():
    problems = [Problem("p", "a", str(i), {"dataset": d}) for i, d in enumerate("xxxy") for _ in range(2)]
    ids = [torch.tensor([1])] * 8
    drawn = Rollouts(ids, ids, [torch.zeros(1)] * 8, ["stop"] * 8, ["a"] * 8, 0)
    right = [1, 1, 0, 0, 1, 0, 0, 1]
    values = held_out(problems, 2, drawn, [Grade(bool(r), "correct" if r else "wrong") for r in right])
    assert values["by_task"] == {"x": 0.5, "y": 0.5} and values["macro"] == 0.5 and values["pass_at"] == {"1": 0.5, "2": 0.75}
    values = held_out(problems, 2, drawn, [Grade(i < 6, "") for i in range(8)])
    assert values["by_task"] == {"x": 1.0, "y": 0.0} and values["macro"] == 0.5 and values["pass_at"]["1"] == 0.75
    one = [Problem(p.prompt, p.answer, p.uid) for p in problems]
    assert not {"macro", "by_task"} & held_out(one, 2, drawn, [Grade(True, "correct")] * 8).keys()


def test_rows_say_what_happened(policy, tmp_path):
    cfg = settings(policy, tmp_path)
    trainer, end, header, rows = run(cfg, first_digit)
    assert header["config"]["sketch"]["rank"] == 8 and header["seed"] == 0 and header["trained_layers"] == 21
    assert [(r["kind"], r["update"]) for r in rows] == [
        ("eval", 0), ("update", 1), ("update", 2), ("eval", 2), ("update", 3), ("update", 4), ("eval", 4), ("end", 4),
    ]  # fmt: skip
    updates, evals = [r for r in rows if r["kind"] == "update"], [r for r in rows if r["kind"] == "eval"]
    assert evals[-1]["fingerprint"] == end["fingerprint"] != evals[0]["fingerprint"]  # the engine's, and the trainer's
    baseline = 0.0
    for r in updates:
        rate = r["grades"].get("correct", 0) / 10
        assert r["reward_rate"] == pytest.approx(rate)
        assert r["baseline"] == pytest.approx(baseline, abs=1e-7)
        mean = rate - 0.01 * (1 - rate)
        assert r["advantage"] == pytest.approx(mean - baseline, abs=1e-6)
        baseline += 0.1 * (mean - baseline)
        assert r["tokens"] == round(r["response_length"] * 10) and 0 <= r["finish_share"] <= 1
        assert r["predicted_kl"] == pytest.approx(r["alpha"] ** 2 * r["q"]) and r["predicted_kl"] <= r["effective_budget"] * 1.000001
        assert r["exact_kl"] == pytest.approx(r["predicted_kl"], rel=0.3)
        assert abs(r["tis_mean"] - 1) < 1e-4 and r["tis_capped"] == 0 and r["mismatch"] < 1e-4
        assert r["grad_norm"] > 0 and r["version"] == r["update"]
        assert 0 < r["payload_bytes"] < r["full_weights_bytes"] == 4 * header["trained_weights"]
        assert {"rollout", "grade", "forward_backward", "probe", "update", "sync", "total"} <= set(r["seconds"]) and r["peak_rss_mib"] > 0
    assert "checkpoint" in updates[2]["seconds"] and "checkpoint" not in updates[1]["seconds"]
    for r in evals:
        assert r["problems"] == 6 and r["samples"] == 2 and set(r["pass_at"]) == {"1", "2"}
        assert r["pass_at"]["1"] == pytest.approx(r["grades"].get("correct", 0) / 12) and r["pass_at"]["1"] <= r["pass_at"]["2"]
        assert len(r["examples"]) == 3
    assert end["fingerprint"] == trainer.method.weights.fingerprint() and end["pass_at_after"] == evals[-1]["pass_at"]


@pytest.mark.parametrize("method", VARIANTS)
def test_the_same_settings_give_the_same_bits_and_another_seed_others(policy, tmp_path, method):
    results = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)  # the global state must not matter
        _, end, _, rows = run(settings(policy, tmp_path / name, **variant(method), seed=seed), first_digit)
        results.append((end["fingerprint"], [exact(r) for r in rows]))
    assert results[0] == results[1]
    assert results[0][0] != results[2][0]


@pytest.mark.parametrize("switch", [s for s in SWITCHES if s not in ("one_sided", "equal_bytes")])
@pytest.mark.parametrize("rule", ["row_adam", "orthogonal"])
def test_every_switch_trains_and_keeps_to_its_budget(policy, tmp_path, switch, rule):
    sketch = {"scored_responses": 6} | SWITCHES[switch]
    trainer, end, _, rows = run(settings(policy, tmp_path, updates=2, sketch=sketch, optim={"rule": rule}, eval_problems=2), first_digit)
    for r in (r for r in rows if r["kind"] == "update"):
        assert 0 < r["predicted_kl"] <= r["effective_budget"] * 1.000001 and r["exact_kl"] == pytest.approx(r["predicted_kl"], rel=0.3)
        assert r["payload_bytes"] < r["full_weights_bytes"]
    assert end["update"] == 2 and trainer.engine.fingerprint() == end["fingerprint"]


def test_the_scoring_pass_sees_the_stated_responses(policy, tmp_path):
    trainer = Trainer(settings(policy, tmp_path, sketch={"projection": "activation", "scored_responses": 7}))
    rollouts = trainer._generate(trainer.task.train(0, 10, 0), trainer.cfg.sampling, 0)
    trainer.method.observe(rollouts, trainer.pad_id)
    lengths = [len(p) + len(r) for p, r in zip(rollouts.prompt_ids, rollouts.response_ids)]
    prefixes = [shared_prefix(rollouts.prompt_ids[i:j]) for i, j in ((0, 4), (4, 7))]  # microbatches of 4
    counted = sum(lengths[:7]) - 3 * prefixes[0] - 2 * prefixes[1]
    assert all(prefixes) and {t.how.source.finder.tokens for t in trainer.method.optimizer.targets.values()} == {counted}
    trainer.close()


@pytest.mark.parametrize("method", VARIANTS)
def test_it_learns(policy, tmp_path, method):
    changes = {"updates": 20, "eval_every": 0, "exact_kl_every": 0, "eval_problems": 64, "eval_samples": 1, "checkpoint_every": 100}
    changes |= {"ppo": {"prompts_per_update": 32, "microbatch": 16}, "kl": {"budget": 3e-2}, "sampling": {"max_tokens": 3}}
    changes |= {"eval_sampling": {"max_tokens": 3, "temperature": 1.0, "top_p": 1.0}, "dense": {"lr": 3e-3}}
    _, end, _, rows = run(settings(policy, tmp_path, **(changes | variant(method))), first_digit)
    assert end["pass_at_before"]["1"] < 0.35
    assert end["pass_at_after"]["1"] > end["pass_at_before"]["1"] + 0.3


def gradient(trainer: Trainer):
    """(loss, sketches) of update 1, without taking it."""
    cfg = trainer.cfg
    problems = trainer.task.train(0, cfg.ppo.prompts_per_update, cfg.seed)
    rollouts = trainer._generate(problems, cfg.sampling, derive_seed(cfg.seed, 1, "rollout"))
    advantages = torch.linspace(-1, 1, len(rollouts))
    stats = trainer._backward(1, rollouts, advantages)
    return rollouts, advantages, stats, {n: t.sketch.grad for n, t in trainer.method.optimizer.targets.items()}


def test_loss_is_the_formula_and_microbatches_do_not_matter(policy, tmp_path):
    seen = {}
    for size in (1, 3, 10):
        trainer = Trainer(settings(policy, tmp_path / str(size), ppo={"microbatch": size}))
        rollouts, advantages, stats, sketches = gradient(trainer)
        total = 0.0
        for i in range(len(rollouts)):  # float64, one response at a time
            ids = torch.cat([rollouts.prompt_ids[i], rollouts.response_ids[i]])
            with torch.no_grad():
                logp = trainer.model(ids[None]).logits[0].double().log_softmax(-1)
            start = len(rollouts.prompt_ids[i])
            for t, token in enumerate(rollouts.response_ids[i].tolist()):
                weight = min(math.exp(float(logp[start + t - 1, token]) - float(rollouts.logprobs[i][t])), 2.0)
                total -= weight * float(advantages[i])
        assert stats["loss"] == pytest.approx(total / rollouts.tokens, abs=1e-5)
        seen[size] = sketches
        trainer.close()
    for size in (1, 3):
        for name, S in seen[10].items():
            assert float((seen[size][name] - S).norm() / S.norm()) < 1e-5
    assert all(float(S.norm()) > 0 for S in seen[10].values())


@pytest.mark.parametrize("switch", ["one_sided", "two_sided", "shared"])
def test_activation_checkpointing_changes_nothing_but_memory(policy, tmp_path, switch):
    sketch = SWITCHES[switch]
    plain = Trainer(settings(policy, tmp_path / "a", sketch=sketch))
    kept = Trainer(settings(policy, tmp_path / "b", sketch=sketch, gradient_checkpointing=True))
    assert kept.model.is_gradient_checkpointing and kept.model.training
    (rollouts, _, first, sketches), (_, _, second, again) = gradient(plain), gradient(kept)
    assert shared_prefix(rollouts.prompt_ids) >= 10  # computed once where there is a cache, row by row where there is none
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    for S, T in zip(sketches.values(), again.values()):
        assert float((S - T).norm() / S.norm()) < 1e-5
    assert kept.run()["update"] == 4


def test_the_memory_switches_change_nothing_but_memory(policy, tmp_path):
    """A as bits: the same bits. Logits in chunks, with and without a shared prefix: one update is the same up to rounding."""
    plain = run(settings(policy, tmp_path / "plain", updates=1))[3][1]
    bits = run(settings(policy, tmp_path / "bits", updates=1, sketch={"projection_storage": "bits"}))[3][1]
    assert exact(bits) == exact(plain) | {k: bits[k] for k in ("run_id",) if k in bits}
    for checkpointing in (False, True):
        chunked = run(settings(policy, tmp_path / f"c{checkpointing}", updates=1, ppo={"logit_chunk": 5}, gradient_checkpointing=checkpointing))[3][1]
        for key in ("loss", "logprob", "grad_norm", "q", "exact_kl"):
            assert chunked[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-7), key


def test_a_run_without_masters_resumes_to_the_same_bits(policy, tmp_path):
    """bf16 weights with stochastic rounding: engine and trainer agree before every rollout (the loop raises if not), a checkpoint goes on."""
    changes = {"optim": {"stochastic_rounding": True}, "compute_dtype": "bfloat16", "updates": 3, "checkpoint_every": 1, "eval_every": 0}
    trainer, end, header, whole = run(settings(policy, tmp_path / "whole", **changes), first_digit)
    run(settings(policy, tmp_path / "parts", **changes | {"updates": 1}), first_digit)
    with pytest.raises(ConfigError, match="optim.stochastic_rounding .saved True, now False"):
        run(settings(policy, tmp_path / "parts", updates=3, checkpoint_every=1, eval_every=0), first_digit)
    _, again, _, rows = run(settings(policy, tmp_path / "parts", **changes), first_digit)
    kept = [exact(r) for r in rows if r["kind"] == "update"]
    assert kept == [exact(r) for r in whole if r["kind"] == "update"] and again["fingerprint"] == end["fingerprint"]
    assert all(r["full_weights_bytes"] == 2 * header["trained_weights"] for r in kept)
    weights, _ = checkpoint.load(checkpoint.latest(tmp_path / "parts" / "checkpoint"))
    assert all(torch.equal(W, trainer.method.weights.stored(n)) and W.dtype == torch.bfloat16 for n, W in weights.items())


METHODS = (("logra", "one_sided"), ("logra", "two_sided"), *((m, "one_sided") for m in VARIANTS[1:]))
SPOILED = [(m, s, w) for m, s in METHODS for w in ("gradient", "loss")]


@pytest.mark.parametrize("method, switch, where", [*SPOILED, *(("logra", "shared activation", w) for w in ("gradient", "scoring"))])
def test_a_bad_number_stops_the_run_with_nothing_changed(policy, tmp_path, method, switch, where):
    trainer = Trainer(settings(policy, tmp_path, **variant(method), updates=3, checkpoint_every=100, sketch=SWITCHES[switch]))
    backward, seen = trainer._backward, {}

    def spoiled(update, rollouts, advantages):
        if update < 2:
            return backward(update, rollouts, advantages)
        seen.update(weights=trainer.method.weights.fingerprint(), baseline=trainer.baseline.value, state=str(trainer.method.state_dict()))
        if where == "loss":
            return backward(update, rollouts, advantages * float("inf"))
        if where == "scoring":
            trainer.method.optimizer.targets["model.layers.1.mlp.up_proj"].how.source.finder._sum_RK[0, 0] = float("nan")
            return backward(update, rollouts, advantages)
        stats = backward(update, rollouts, advantages)
        weight = trainer.model.model.layers[1].mlp.up_proj
        spoilt = {"logra": lambda: weight.logra_sketch, "lora": lambda: weight.lora_B["default"].weight}.get(method, lambda: weight.weight)()
        spoilt.grad.view(-1)[0] = float("nan")
        return stats

    trainer._backward = spoiled
    message = {"loss": "loss of microbatch 0", "scoring": "inputs of .*layers.1.mlp.gate_proj"}.get(where, ".*layers.1.mlp.up_proj")
    with pytest.raises(NonFiniteError, match="update 2 was not taken: " + message):
        trainer.run()
    assert trainer.method.version == 1 and trainer.engine.version == 1
    assert trainer.method.weights.fingerprint() == seen["weights"] == trainer.engine.fingerprint()
    assert trainer.baseline.value == seen["baseline"] and str(trainer.method.state_dict()) == seen["state"]
    assert trainer.method.grad_norm() == 0


@pytest.mark.parametrize("method", VARIANTS)
def test_an_engine_out_of_step_is_never_sampled_from(policy, tmp_path, method):
    trainer = Trainer(settings(policy, tmp_path, **variant(method)))
    update = trainer._update

    def meddled(number):
        row = update(number)
        if number == 1:
            with torch.no_grad():
                trainer.engine.model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1e-6
        return row

    trainer._update = meddled
    with pytest.raises(SyncError, match="before a rollout at version 1"):
        trainer.run()


def test_a_lost_update_is_noticed(policy, tmp_path):
    trainer = Trainer(settings(policy, tmp_path))
    trainer.engine.sync = lambda data: None
    with pytest.raises(SyncError, match="before a rollout at version 1"):
        trainer.run()


def test_rollouts_come_from_the_current_version(policy, tmp_path):
    trainer, versions = Trainer(settings(policy, tmp_path)), []
    generate = trainer._generate

    def watched(*arguments):
        made = generate(*arguments)
        versions.append(made.version)
        return made

    trainer._generate = watched
    trainer.run()
    assert versions == [0, 0, 1, 2, 2, 3, 4]


def test_resume_refuses_other_settings_by_name_and_accepts_more_updates(policy, tmp_path):
    cfg = settings(policy, tmp_path)
    _, end, _, rows = run(cfg)
    budget = r"kl\.budget \(saved 0\.005, now 0\.006\)"
    for change, name in (({"seed": 1}, "seed"), ({"kl": {"budget": 6e-3}}, budget), ({"eval_samples": 1}, "eval_samples")):
        with pytest.raises(ConfigError, match=name):
            Trainer(settings(policy, tmp_path, **change)).run()
    assert read_log(tmp_path / "log.jsonl")[1] == rows
    assert Trainer(cfg).run() == end  # finished: nothing to do, nothing written
    assert read_log(tmp_path / "log.jsonl")[1] == rows
    sketch = dataclasses.replace(cfg.sketch, projection_storage="bits")  # the same A, kept otherwise from here on
    _, longer, _, more = run(dataclasses.replace(cfg, updates=6, eval_every=3, checkpoint_every=1, sketch=sketch))
    _, whole, _, all_rows = run(settings(policy, tmp_path / "whole", updates=6, eval_every=2, checkpoint_every=2))
    assert longer["fingerprint"] == whole["fingerprint"] != end["fingerprint"]
    kept = [exact(r) for r in more if r["kind"] == "update"]
    assert kept == [exact(r) for r in all_rows if r["kind"] == "update"]
    with pytest.raises(ConfigError, match="updates = 2"):
        Trainer(dataclasses.replace(cfg, updates=2)).run()


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(policy, tmp_path):
    other = tiny_policy(tmp_path / "other", seed=1)
    cfg = settings(policy, tmp_path / "run", updates=2)
    run(cfg)
    moved = settings(other, tmp_path / "moved", updates=2)
    run(moved)
    tiny_policy(other, seed=2)  # the same path now holds another model
    with pytest.raises(checkpoint.CheckpointError, match="another model"):
        Trainer(dataclasses.replace(moved, updates=3)).run()
    file = tmp_path / "run" / "checkpoint" / "000002" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        Trainer(dataclasses.replace(cfg, updates=3)).run()
    file.write_bytes(data[:-100])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        Trainer(dataclasses.replace(cfg, updates=3)).run()


def test_a_finished_log_without_checkpoint_is_not_overwritten(policy, tmp_path):
    cfg = settings(policy, tmp_path, updates=1, checkpoint_every=1)
    run(cfg)
    before = (tmp_path / "log.jsonl").read_bytes()
    for path in (tmp_path / "checkpoint").glob("*/*"):
        path.unlink()
    for path in (tmp_path / "checkpoint").iterdir():
        path.rmdir()
    with pytest.raises(ConfigError, match="finished run"):
        Trainer(cfg).run()
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_a_folder_in_use_is_refused_and_zero_updates_only_evaluate(policy, tmp_path):
    cfg = settings(policy, tmp_path, updates=0)
    held = checkpoint.lock(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="in use"):
        Trainer(cfg).run()
    held.close()
    end = Trainer(cfg).run()
    assert end["pass_at_before"] == end["pass_at_after"]
    assert [r["kind"] for r in read_log(tmp_path / "log.jsonl")[1]] == ["eval", "end"]
    assert Trainer(cfg).run() == end  # finished: nothing to do, nothing written
    assert [r["kind"] for r in read_log(tmp_path / "log.jsonl")[1]] == ["eval", "end"]
    with pytest.raises(ConfigError, match="is of another run: seed"):
        Trainer(dataclasses.replace(cfg, seed=1)).run()
    with pytest.raises(ConfigError, match="finished run"):  # a finished log, and no checkpoint to go on from
        Trainer(dataclasses.replace(cfg, updates=1)).run()


def questions(folder, train: list[str], heldout: list[str]) -> dict:
    """Settings of a math task with these questions; the answer is always 1."""
    folder.mkdir(exist_ok=True)
    for name, texts in (("train", train), ("eval", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"problem": t, "answer": "1"}) + "\n" for t in texts))
    return {"name": "math", "options": {}, "train_data": str(folder / "train.jsonl"), "eval_data": str(folder / "eval.jsonl")}


SHORT, HELD_OUT, LONG = [f"What is {i} / {i}?" for i in range(1, 8)], [f"What is {i} - {i - 1}?" for i in range(5)], ["Long " * 50, "Longer " * 40]


def test_training_questions_that_do_not_fit_are_dropped_the_same_way_on_resume(policy, tmp_path, capsys):
    changes = {"task": questions(tmp_path / "data", SHORT + LONG, HELD_OUT), "ppo": {"prompts_per_update": 3}, "checkpoint_every": 1}
    seen = []

    def watch(trainer):
        respond = trainer._respond
        trainer._respond = lambda update: seen.append([p.prompt for p in trainer.task.train(update - 1, 3, 0)]) or respond(update)

    _, end, header, _ = run(settings(policy, tmp_path / "whole", **changes), watch)
    assert header["task_counts"]["train_too_long"] == 2 and header["task_counts"]["train_kept"] == 7
    assert "2 of 9 training questions dropped" in capsys.readouterr().out
    assert {p for prompts in seen for p in prompts} <= set(SHORT)
    whole, seen[:] = list(seen), []
    run(settings(policy, tmp_path / "parts", **changes | {"updates": 2}), watch)
    _, again, _, _ = run(settings(policy, tmp_path / "parts", **changes), watch)
    assert again["fingerprint"] == end["fingerprint"] and seen == whole
    trainer = Trainer(settings(policy, tmp_path / "parts", **changes | {"updates": 5}))
    trainer.engine.room = 1000  # as after a server was started with another max_model_len
    with pytest.raises(ConfigError, match=r"log.jsonl.* began without 2 .*too long.*now 0"):
        trainer.run()


def test_questions_that_do_not_fit_are_named_at_the_start_or_when_drawn(policy, tmp_path):
    fits = {"eval_problems": 6, "eval_samples": 1}
    held_out = settings(policy, tmp_path / "a", task=questions(tmp_path / "data", SHORT, HELD_OUT + LONG[:1]), **fits)
    with pytest.raises(ConfigError, match=r"held-out question '(Long ){16}' takes 254 tokens; eval_sampling.max_tokens 6 leaves 250 of 256"):
        Trainer(held_out).run()
    none = settings(policy, tmp_path / "b", task=questions(tmp_path / "data", LONG, HELD_OUT), **fits)
    with pytest.raises(ConfigError, match="no training question is left.* all 2 do not fit.*sampling.max_tokens 6"):
        Trainer(none).run()
    assert not (tmp_path / "a" / "log.jsonl").exists() and not (tmp_path / "b" / "log.jsonl").exists()
    drawn = settings(policy, tmp_path / "c", sampling={"max_tokens": 240})
    with pytest.raises(ConfigError, match=r"(?s)question '.*' takes \d+ tokens; sampling.max_tokens 240 leaves 16 of 256.*smaller.*max_model_len"):
        Trainer(drawn).run()


def test_checkpoints_are_swept_and_only_the_newest_stays(tmp_path):
    state = {"config": "{}"}
    for update in (1, 2, 3):
        checkpoint.save(tmp_path, update, {"w": torch.full((2,), float(update))}, state)
    (tmp_path / ".tmp-000004").mkdir()
    (tmp_path / ".tmp-000004" / "state.pt").write_bytes(b"half")
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["000003"]
    assert checkpoint.latest(tmp_path).name == "000003"
    checkpoint.sweep(tmp_path)
    assert not list(tmp_path.glob(".tmp*"))
    weights, saved = checkpoint.load(checkpoint.latest(tmp_path))
    assert weights["w"].tolist() == [3.0, 3.0] and saved["update"] == 3
    with pytest.raises(checkpoint.CheckpointError, match="there already"):
        checkpoint.save(tmp_path, 3, {"w": torch.zeros(1)}, state)


def test_dense_schedule():
    cfg = TrainConfig().dense
    lrs = [dense_lr(cfg, u) for u in range(1, 400)]
    assert lrs[:9] == pytest.approx([1e-6 * u / 9 for u in range(1, 10)])
    assert lrs[299] == pytest.approx(1e-7) == pytest.approx(lrs[398])
    middle = 9 + (300 - 9) / 2
    assert dense_lr(cfg, round(middle)) == pytest.approx(1e-6 * (0.1 + 0.9 * 0.5), rel=0.02)
    assert all(a >= b for a, b in zip(lrs[8:], lrs[9:]))


def test_seeds_differ_by_every_part():
    made = {derive_seed(s, u, p) for s in range(20) for u in range(20) for p in ("rollout", "probe", "eval")}
    assert len(made) == 20 * 20 * 3 and all(0 <= v < 2**63 for v in made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"temperature": 0.0}}, "temperature > 0 and top_p 1"),
        ({"sampling": {"top_p": 0.9}}, "temperature > 0 and top_p 1"),
        ({"sampling": {"temperature": 0.6}}, "kl.temperature = 1.0, sampling.temperature = 0.6"),
        ({"sketch": {"targets": ["nothing"]}}, "matches no module"),
        ({"task": {"name": "chain_sums"}}, "chain_sum"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(policy, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(settings(policy, tmp_path, **change))
    assert not (tmp_path / "log.jsonl").exists()


def test_temperature_is_the_same_on_both_sides(policy, tmp_path):
    _, _, _, rows = run(settings(policy, tmp_path, updates=1, sampling={"temperature": 0.6}, kl={"temperature": 0.6}))
    row = next(r for r in rows if r["kind"] == "update")
    assert abs(row["tis_mean"] - 1) < 1e-4 and abs(row["tis_max"] - 1) < 1e-3


def test_load_config_merges_files_defaults_and_arguments(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("updates: 7\noptim: {update_ratio: 1e-4}\ntask: {options: {min_terms: 2}}\neval_sampling: {max_tokens: 16}\n")
    given = ["optim.beta2=0.9", "task.options.max_terms=2", "kl.budget=5e-3", "sketch.targets=[q_proj]", "out=x/y", "ppo.clip=.1"]
    cfg = load_config(path, given)
    assert cfg.updates == 7 and cfg.optim.update_ratio == 1e-4 and cfg.optim.beta2 == 0.9 and cfg.kl.budget == 5e-3 and cfg.ppo.clip == 0.1
    assert cfg.task.options == {"min_terms": 2, "max_terms": 2} and cfg.sketch.targets == ("q_proj",) and cfg.out == "x/y"
    assert cfg.eval_sampling == SamplingConfig(16, 0.7, 0.7)  # the run's defaults, not those of the class
    as_json = tmp_path / "run.json"
    as_json.write_text(json.dumps({"updates": 7, "optim": {"update_ratio": 1e-4}}))
    assert load_config(as_json).optim == load_config(path).optim
    for arguments, message in (
        (["updatez=3"], "no field updatez"), (["optim.lr=3"], "no field lr"), (["updates"], "dotted.key=value"),
        (["updates.x=1"], "has no fields"),
        (["updates=many"], "expected int"), (["kl.budget=-1"], "KLConfig.budget = -1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            load_config(path, arguments)
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="allowed are"):
        load_config(tmp_path / "run.toml")


def test_command_line(policy, tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(dataclasses.asdict(settings(policy, tmp_path / "out"))))
    assert main([str(path), "updates=1", "checkpoint_every=1"]) == 0
    assert "after 1 updates" in capsys.readouterr().out
    assert main([str(path), "updates=1", "seed=5"]) == 2
    assert "seed (saved 0, now 5)" in capsys.readouterr().err
    assert main([]) == 2
    for error in (RolloutError("no server"), SyncError("engine weights differ"), ImportError("needs vLLM"), ZeroDivisionError("a mistake")):
        monkeypatch.setattr(Trainer, "run", lambda self, error=error: (_ for _ in ()).throw(error))
        if isinstance(error, ZeroDivisionError):  # a mistake in the program keeps its traceback
            with pytest.raises(ZeroDivisionError):
                main([str(path), "updates=1"])
        else:
            assert main([str(path), "updates=1"]) == 2
            assert capsys.readouterr().err.splitlines()[-1] == f"error: {error}"


def test_a_server_elsewhere_that_cannot_take_the_weights_is_refused_before_the_run(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("logra_core.rl.engine.LARGEST", 400_000)  # bytes; the tiny policy's targets have 442368
    monkeypatch.setattr("logra_core.rl.trainer.make_engine", lambda cfg: None)
    cfg = settings(policy, tmp_path, engine="vllm", engine_urls=["http://127.0.0.1:1", "http://other:8000"])
    with pytest.raises(ConfigError, match="engine_urls: http://other:8000 .* 442,368 bytes.* 400,000.*127.0.0.1"):
        Trainer(cfg)


def test_the_score_sketch_controls_a_run(policy, tmp_path):
    kl = {"estimator": "score_sketch", "score_samples": 16}
    _, end, _, rows = run(settings(policy, tmp_path, updates=2, kl=kl, optim={"update_ratio": 0.05}, eval_problems=2), first_digit)
    for r in (r for r in rows if r["kind"] == "update"):
        assert r["estimator"] == "score_sketch" and r["alpha"] < 3 and r["predicted_kl"] == pytest.approx(r["effective_budget"])
        assert 0.3 < r["exact_kl"] / r["predicted_kl"] < 3  # √(2/32) is a quarter
    assert end["update"] == 2


FULL = """import resource, sys
from logra_core.rl.train import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)  # no file may grow beyond: as on a disk that is full
sys.exit(main(sys.argv[2:]))
"""


def test_a_checkpoint_that_cannot_be_written_says_so_and_the_run_goes_on_afterwards(policy, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_dict(settings(policy, tmp_path / "run", updates=2, checkpoint_every=1, eval_every=0, exact_kl_every=0))))
    done = subprocess.run([sys.executable, "-c", FULL, "300000", str(path)], capture_output=True, text=True)  # the targets have 442368 bytes
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "error: checkpoint 000001 could not be written to" in done.stderr and "make room and start the run again" in done.stderr
    assert main([str(path)]) == 0 and checkpoint.latest(tmp_path / "run/checkpoint").name == "000002"


def test_a_file_in_the_place_of_the_runs_folder_is_named(policy, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    path = tmp_path / "run.json"
    for out in ("taken", "taken/run"):
        path.write_text(json.dumps(to_dict(settings(policy, tmp_path / out))))
        assert main([str(path)]) == 2 and "a file is in the way" in capsys.readouterr().err
