"""LoGRA inside other people's loops: transformers' Trainer and TRL's GRPOTrainer, really run, against dense gradients and float64 loops."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

for package in ("trl", "accelerate", "datasets"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[compare,tasks]' (make test does)")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from models import policy_loss, probe_batch, random_ids, real_llm, tiny_llama  # noqa: E402
from tiny import tiny_tokenizer  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from logra_core import ConfigError, LoGRA, NonFiniteError
from logra_core.integrations.trl import KLControlCallback  # noqa: E402
from logra_core.lab import reference  # noqa: E402
from logra_core.rl.answers import final_answer, number  # noqa: E402
from logra_core.rl.settings import TaskConfig  # noqa: E402
from logra_core.rl.tasks import make_task  # noqa: E402
from logra_core.variants import KLConfig, OptimConfig, SketchConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
QUIET = dict(use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, seed=0)
TOLERANCE = 1e-5  # relative, fp32; measured at most 2e-6


class AgainstDense:
    """Mixin: each loss is also differentiated on a twin without sketches; before each step every sketch must be G Aᵀ of the twin, clipped."""

    def watch(self, logra: LoGRA, twin: torch.nn.Module) -> None:
        self.logra, self.twin, self.worst, self.norms = logra, twin, [], []
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(name.removesuffix(".weight") in logra.targets)
        self.add_callback(BeforeStep(self))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.twin.load_state_dict(self.logra.model.state_dict())
        self.twin.train()
        super().compute_loss(self.twin, dict(inputs), num_items_in_batch=num_items_in_batch).backward()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def compare(self) -> None:
        dense = {n: self.twin.get_submodule(n).weight.grad.double() @ t.projection().double().T for n, t in self.logra.targets.items()}
        norm = math.sqrt(sum(float(S.square().sum()) for S in dense.values()))
        clip = min(1.0, self.args.max_grad_norm / (norm + 1e-6)) if self.args.max_grad_norm else 1.0
        errors = [float((t.sketch.grad - clip * dense[n]).norm() / (clip * dense[n]).norm()) for n, t in self.logra.targets.items()]
        self.norms.append(norm)
        self.worst.append(max(errors))
        self.twin.zero_grad()


class BeforeStep(TrainerCallback):
    def __init__(self, trainer: AgainstDense) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.trainer.compare()


class CheckedTrainer(AgainstDense, Trainer):
    pass


class CheckedGRPO(AgainstDense, GRPOTrainer):
    pass


# ------------------------------------------------------------------ GRPO on the real LLM


def closeness(answers: list[str], golds: list[str]) -> list[float]:
    """1 for the right number, less the farther off, 0 for no number: most groups then have different rewards."""
    values = [(number(final_answer(a) or ""), number(g)) for a, g in zip(answers, golds, strict=True)]
    return [0.0 if got is None else float(1 / (1 + abs(got - gold))) for got, gold in values]


def chain_sum_rewards(task, problems):
    """Two reward functions as TRL calls them, on the first line of a response: the verifier's verdict, and closeness."""
    by_uid = {p.uid: p for p in problems}

    def verified(completions, uid, **_):
        return [float(g.correct) for g in task.grade([c.strip().split("\n")[0] for c in completions], [by_uid[u] for u in uid])]

    def close(completions, uid, **_):
        return closeness([c.strip().split("\n")[0] for c in completions], [by_uid[u].answer for u in uid])

    return [verified, close]


def test_five_grpo_steps_of_the_real_llm(tmp_path):
    """Accumulation, clipping and activation checkpointing as TRL has them; S = clip · G Aᵀ at each step, KL within budget, weights move."""
    options = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    task = make_task(TaskConfig(name="chain_sum", options=options))
    problems, shown = task.train(0, 16, 0), task.train(1, 3, 0)
    sums = {p.uid: p.prompt.rpartition(": ")[2] for p in (*problems, *shown)}
    start = "".join(f"{sums[p.uid]} {p.answer}\n" for p in shown)  # so that it answers in digits, and groups differ in reward
    model, tokenizer = real_llm()
    logra = LoGRA(model, SketchConfig(rank=16), OptimConfig(update_ratio=1e-3))
    control = KLControlCallback(logra, KLConfig(schedule="constant", budget=1e-3), exact=True)
    args = GRPOConfig(tmp_path, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=4,
                      max_completion_length=4, bf16=False, save_strategy="no", **QUIET)  # fmt: skip
    assert args.gradient_checkpointing and args.max_grad_norm == 1.0  # TRL's defaults, wanted here
    data = Dataset.from_list([{"prompt": start + sums[p.uid], "uid": p.uid} for p in problems])
    trainer = CheckedGRPO(model=model, reward_funcs=chain_sum_rewards(task, problems), args=args, train_dataset=data,
                          processing_class=tokenizer, optimizers=(logra, None), callbacks=[control])  # fmt: skip
    twin = real_llm()[0]
    add_fused_lm_head(twin, temperature=args.temperature, outputs=("log_probs", "entropy"))
    trainer.watch(logra, twin)
    moved, before = [], logra.weights.fingerprint()
    trainer.add_callback(type("Moves", (TrainerCallback,), {"on_step_end": lambda *a, **k: moved.append(logra.weights.fingerprint())})())
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert logra.version == len(logs) == len(trainer.worst) == 5
    told = [i for i, norm in enumerate(trainer.norms) if norm > 0]  # where all rewards of a group are equal there is nothing to learn
    assert len(told) >= 3, trainer.norms
    assert len(set([before, *moved])) == 1 + len(told)
    assert all(trainer.worst[i] <= TOLERANCE for i in told), trainer.worst
    assert [row["grad_norm"] for row in logs] == pytest.approx(trainer.norms, rel=1e-5, abs=0)
    # On policy the loss is 0 up to the lengths of the responses, whatever is learned; the entropy tells more.
    assert all(math.isfinite(row["loss"]) for row in logs) and len({row["entropy"] for row in logs}) == 5
    assert all(control.history[i]["exact_kl"] == pytest.approx(1e-3, rel=0.2) for i in told), control.history
    assert [row["kl/predicted_kl"] for row in logs] == [row["predicted_kl"] for row in control.history]
    task.close()


# ------------------------------------------------------------------ a tiny model: everything a trainer may do


def tiny_data(rows: int = 24, tokens: int = 12, prompt: int = 4) -> Dataset:
    ids = random_ids(rows, tokens, 96)
    labels = ids.clone()
    labels[:, :prompt] = -100
    return Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": labels.tolist()})


def tiny_trainer(folder, model=None, budget=1e-6, cls=Trainer, refresh=True, exact=False, rule="row_adam", kl={}, **changes):
    """(trainer, logra, control) of a fresh tiny model; budget None: no KL control."""
    model = tiny_llama() if model is None else model
    logra = LoGRA(model, SketchConfig(rank=4, refresh=refresh), OptimConfig(update_ratio=1e-2, rule=rule))
    control = KLControlCallback(logra, KLConfig(schedule="constant", budget=budget, **kl), exact=exact) if budget else None
    settings = dict(max_steps=4, per_device_train_batch_size=2, save_strategy="no") | QUIET | changes
    trainer = cls(model, TrainingArguments(folder, **settings), train_dataset=tiny_data(), optimizers=(logra, None),
                  callbacks=[control] if control else [])  # fmt: skip
    return trainer, logra, control


def state(logra: LoGRA) -> tuple:
    """Everything that must come back bit for bit."""
    tensors = {f"{i}.{k}": v for i, s in enumerate(logra.state_dict()["state"].values()) for k, v in s.items()}
    tensors |= logra.model.state_dict()
    return logra.run_id, logra.version, {k: v.detach().clone() for k, v in tensors.items()}


def assert_equal(ours: tuple, theirs: tuple) -> None:
    assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
    assert not [k for k, v in ours[2].items() if not torch.equal(v, theirs[2][k])]


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e9])
def test_sketches_under_accumulation_clipping_and_checkpointing(tmp_path, checkpointing, clip):
    ways = {} if checkpointing is None else {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    trainer, logra, control = tiny_trainer(
        tmp_path, cls=CheckedTrainer, exact=True, max_grad_norm=clip, gradient_accumulation_steps=3, **ways
    )
    trainer.watch(logra, copy.deepcopy(tiny_llama()))
    trainer.train()
    assert logra.version == 4 and len(trainer.worst) == 4 and max(trainer.worst) <= TOLERANCE
    assert clip != 0.05 or min(trainer.norms) > clip  # otherwise nothing was clipped
    assert all(row["exact_kl"] == pytest.approx(1e-6, rel=0.1) for row in control.history) and len(control.history) == 4
    assert logra.scale is None and not logra.model._forward_pre_hooks  # the callback leaves nothing behind


RESUMED = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=3),
    "clipping": dict(max_grad_norm=0.05),
    "all": dict(gradient_accumulation_steps=2, max_grad_norm=0.05, gradient_checkpointing=True, lr_scheduler_type="cosine", warmup_steps=1),
    "no control": dict(budget=None),
    "fixed A, sgd": dict(refresh=False, rule="sgd"),
    "bf16 weights": dict(dtype=torch.bfloat16),
    "bf16 autocast": dict(bf16=True),
    "a probe that starts at the last q": dict(kl=dict(estimator="finite_difference", probe_kl=1e-4)),
}


@pytest.mark.parametrize("change", RESUMED.values(), ids=RESUMED.keys())
def test_resuming_from_optimizer_pt_is_bit_equal(tmp_path, change):
    """Four steps at once, and two, a checkpoint, a new process's worth of objects, two more; torch.load there is weights_only."""
    dtype = change.get("dtype", torch.float32)
    settings = {k: v for k, v in change.items() if k != "dtype"} | dict(save_strategy="steps", save_steps=2)
    whole, logra, _ = tiny_trainer(tmp_path, tiny_llama().to(dtype), **settings)
    whole.train()
    resumed, again, control = tiny_trainer(tmp_path, tiny_llama(seed=5).to(dtype), **settings)
    assert again.run_id != logra.run_id
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(state(again), state(logra))
    assert control is None or [row["version"] for row in control.history] == [3, 4]
    rows = [[r for r in t.state.log_history if "loss" in r] for t in (whole, resumed)]
    assert rows[0] == rows[1] and len(rows[0]) == 4


def test_the_mismatch_that_was_observed_comes_back_with_the_optimizer(tmp_path):
    def run(seed, **resume):
        trainer, logra, control = tiny_trainer(tmp_path, tiny_llama(seed=seed), save_strategy="steps", save_steps=2)

        class Feed(TrainerCallback):
            def on_step_begin(self, args, state, *rest, **kwargs):
                if state.global_step < 2:  # before the checkpoint
                    control.controller.observe_mismatch(4e-7)

        trainer.add_callback(Feed())
        trainer.train(**resume)
        assert "kl_control" not in logra.param_groups[0]  # a later train() would go back to it
        return state(logra), control.history[-2:]

    whole, ours = run(0)
    again, theirs = run(5, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(again, whole)
    assert ours == theirs and ours[0]["effective_budget"] == pytest.approx(6e-7)


def test_a_checkpoint_is_a_plain_model(tmp_path):
    """Nothing of LoGRA in it: transformers alone loads it, and it holds the trained weights."""
    trainer, logra, _ = tiny_trainer(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    plain, info = type(logra.model).from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True, dtype=torch.float32)
    assert not any(info.values())
    ours, theirs = logra.model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_another_settings_checkpoint_is_refused(tmp_path):
    trainer, *_ = tiny_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    other, logra, _ = tiny_trainer(tmp_path, refresh=False)
    with pytest.raises(ConfigError, match="saved LoGRA state does not fit"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logra.version == 0


def test_the_scheduler_scales_the_update_ratio(tmp_path):
    trainer, logra, _ = tiny_trainer(tmp_path, budget=None, lr_scheduler_type="linear", learning_rate=123.0)
    sizes, apply = [], logra.apply
    logra.apply = lambda update, alpha: sizes.append(logra._pending.size / math.sqrt(sum(logra.weights.norms_sq()))) or apply(update, alpha)
    trainer.train()
    assert sizes == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])  # the arguments' learning rate is not ours
    assert [r["learning_rate"] for r in trainer.state.log_history if "loss" in r] == pytest.approx(sizes)


# ------------------------------------------------------------------ what clipping means


@pytest.mark.parametrize("rule", ["row_adam", "sgd"])
def test_clipping_reaches_the_moments_and_never_the_step(rule):
    """Against float64 loops on c · S. Batches of very different norms, so that c differs from step to step."""
    clipped = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-3, rule=rule, wire_dtype="float32"))
    free = LoGRA(tiny_llama(), SketchConfig(rank=4), OptimConfig(update_ratio=1e-3, rule=rule, wire_dtype="float32"))
    moments = {n: torch.zeros(t.module.out_features) for n, t in clipped.targets.items()}
    factors, apart = [], []
    for step, loss_scale in enumerate((1.0, 300.0, 0.01, 30.0), start=1):
        ids = random_ids(2, 8, 96, step)
        for logra in (clipped, free):
            (loss_scale * policy_loss(logra.model, ids, step)).backward()
        S = {n: t.sketch.grad.double().clone() for n, t in clipped.targets.items()}
        norm = math.sqrt(sum(float(s.square().sum()) for s in S.values()))
        torch.nn.utils.clip_grad_norm_(clipped.model.parameters(), 0.05)
        factors.append(min(1.0, 0.05 / (norm + 1e-6)))
        before = {n: t.weight.detach().double().clone() for n, t in clipped.targets.items()}
        A, U = {n: t.projection().double() for n, t in clipped.targets.items()}, {}
        for n, s in S.items():
            U[n], moments[n] = reference.row_adam(factors[-1] * s, moments[n], step, 0.95, 1e-8) if rule == "row_adam" else (s, moments[n])
        ratio = 1e-3 * math.sqrt(sum(float(w.square().sum()) for w in before.values()))
        size = ratio / math.sqrt(sum(float((U[n] @ A[n]).square().sum()) for n in U))
        clipped.step(), free.step()
        moved = {n: t.weight.double() - before[n] for n, t in clipped.targets.items()}
        assert math.sqrt(sum(float(m.square().sum()) for m in moved.values())) == pytest.approx(ratio, rel=1e-4)  # full length, clipped or not
        assert all((m + size * U[n] @ A[n]).abs().max() <= 1e-7 for n, m in moved.items())  # fp32 weights of size 0.1 round at 4e-9
        apart.append(max(float((t.weight - free.targets[n].weight).abs().max()) for n, t in clipped.targets.items()))
        free.model.load_state_dict(clipped.model.state_dict())
    assert factors[0] < 1 and factors[1] < 0.01 and factors[2] == 1.0  # else the test shows nothing
    assert apart[0] <= 1e-7  # at the first step v has no history, and RowAdam does not know the scale of S
    assert max(apart[1:]) > 1e-5 if rule == "row_adam" else max(apart) <= 1e-7


def test_the_norm_that_trainers_log_is_that_of_the_dense_gradient():
    """E‖G Aᵀ‖² = ‖G‖²: the mean over draws of the squared sketch norm."""
    dense = tiny_llama()
    policy_loss(dense, random_ids(2, 8, 96)).backward()
    norm_sq = sum(float(p.grad.square().sum()) for n, p in dense.named_parameters() if n.endswith("_proj.weight"))
    draws = []
    for seed in range(40):
        logra = LoGRA(tiny_llama(), SketchConfig(rank=16, seed=seed))
        policy_loss(logra.model, random_ids(2, 8, 96)).backward()
        draws.append(logra.grad_norm() ** 2 / norm_sq)
    assert sum(draws) / len(draws) == pytest.approx(1, abs=0.1) and max(draws) - min(draws) > 0.01


# ------------------------------------------------------------------ refusals


def test_a_loss_of_nan_stops_training_before_the_weights(tmp_path):
    class Broken(Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * (float("nan") if logra.version == 2 else 1.0)

    trainer, logra, _ = tiny_trainer(tmp_path, cls=Broken)
    kept = []
    trainer.add_callback(type("Keep", (TrainerCallback,), {"on_step_end": lambda *a, **k: kept.append(logra.weights.fingerprint())})())
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        trainer.train()
    assert logra.version == 2 and logra.weights.fingerprint() == kept[-1]


def test_the_callback_refuses_what_it_cannot_do_right(tmp_path):
    trainer, logra, control = tiny_trainer(tmp_path / "a")
    stranger, _, other = tiny_trainer(tmp_path / "b")
    trainer.pop_callback(control)
    trainer.add_callback(other)
    with pytest.raises(ConfigError, match="not this callback's LoGRA"):
        trainer.train()
    for args, needle in (({"world_size": 2}, "2 processes"), ({"world_size": 1, "temperature": 0.7}, "samples at 0.7")):
        with pytest.raises(ConfigError, match=needle):
            control.on_train_begin(SimpleNamespace(**args), None, None, optimizer=logra)
    assert logra.scale is None and logra.version == 0


@pytest.mark.parametrize(("column", "needle"), [("labels", "no contexts"), ("position_ids", "no packed sequences")])
def test_batches_without_labels_or_packed_are_refused_unless_contexts_are_given(tmp_path, column, needle):
    class Other(Trainer):  # a loss of its own, as with label smoothing; or packed rows
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids = inputs["input_ids"]
            extra = {"labels": ids, "position_ids": torch.arange(ids.shape[1])[None]} if column == "position_ids" else {}
            return policy_loss(lambda input_ids, use_cache: model(input_ids=input_ids, **extra), ids)

    trainer, logra, control = tiny_trainer(tmp_path, cls=Other, max_steps=1)
    with pytest.raises(ConfigError, match=needle):
        trainer.train()
    assert logra.version == 0
    trainer, logra, control = tiny_trainer(tmp_path, cls=Other, max_steps=1)
    control.probe = lambda: probe_batch(random_ids(3, 10, 96, 9), 4)
    trainer.train()
    assert logra.version == 1 and control.history[0]["predicted_kl"] == pytest.approx(1e-6)


# ------------------------------------------------------------------ resume of the real LLM, and of GRPO; where TRL is missing


def test_the_real_llm_resumes_bit_equal_under_transformers_trainer(tmp_path):
    settings = dict(gradient_accumulation_steps=2, max_grad_norm=0.5, gradient_checkpointing=True, budget=1e-4, save_strategy="steps",
                    save_steps=1, max_steps=2)  # fmt: skip
    whole, logra, control = tiny_trainer(tmp_path, real_llm()[0], **settings)
    whole.train()
    resumed, again, _ = tiny_trainer(tmp_path, real_llm()[0], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(state(again), state(logra))
    logs = [r for r in whole.state.log_history if "loss" in r]
    assert [r["grad_norm"] > 0.5 for r in logs] == [True, True]  # clipped
    assert [r["kl/predicted_kl"] for r in logs] == pytest.approx([1e-4, 1e-4]) and logra.version == 2


def test_grpo_resumes_bit_equal(tmp_path):
    """Sampling included: the generation that the interrupted run would have made is made again."""
    data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)])
    tokenizer = tiny_tokenizer()

    def run(resume=None):
        model = tiny_llama(seed=0 if resume is None else 5, vocab_size=len(tokenizer))
        logra = LoGRA(model, SketchConfig(rank=4), OptimConfig(update_ratio=1e-2))
        control = KLControlCallback(logra, KLConfig(schedule="constant", budget=1e-4))
        args = GRPOConfig(tmp_path, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
                          max_completion_length=6, bf16=False, save_steps=2, **QUIET)  # fmt: skip
        trainer = GRPOTrainer(model=model, reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions], args=args,
                              train_dataset=data, processing_class=tokenizer, optimizers=(logra, None), callbacks=[control])  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return logra, [(r["loss"], r["reward"], r["kl/alpha"]) for r in trainer.state.log_history if "loss" in r]

    (whole, logs), (again, logs_again) = run(), run(str(tmp_path / "checkpoint-2"))
    assert_equal(state(again), state(whole))
    assert logs == logs_again and len(logs) == 4 and len({reward for _, reward, _ in logs}) > 1


@pytest.mark.parametrize("ci", ["true", ""])
def test_without_trl_these_tests_fail_in_ci(ci):
    code = "import sys; sys.modules['trl'] = None; import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/test_dropin.py']))"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=os.environ | {"CI": ci})
    assert "trl is not installed: pip install -e '.[compare,tasks]'" in done.stdout
    assert ("1 error" if ci else "1 skipped") in done.stdout.splitlines()[-1] and (done.returncode == 2) == bool(ci)


def test_importing_the_package_needs_no_trainer():
    """Neither TRL nor accelerate; the callback needs transformers only."""
    code = "import sys; sys.modules |= dict.fromkeys(('trl', 'peft', 'datasets')); import logra_core; assert 'accelerate' not in sys.modules"
    code += "; assert 'transformers.trainer_callback' not in sys.modules; import logra_core.integrations.trl"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[1])
