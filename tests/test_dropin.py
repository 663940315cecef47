"""LoGRA inside other people's loops: transformers' Trainer and TRL's GRPOTrainer, really run, against dense gradients and float64 loops."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import policy_loss, probe_batch, random_ids, real_llm, tiny_llama
from tiny import tiny_tokenizer

INSTALL = "is not installed: pip install -e '.[compare]' (make test does)"
for package in ("accelerate", "datasets", "trl"):
    pytest.importorskip(package, reason=f"{package} {INSTALL}")

from datasets import Dataset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from logra_core import ConfigError, KLConfig, LoGRA, NonFiniteError, OptimConfig, SketchConfig, TaskConfig, reference  # noqa: E402
from logra_core.answers import final_answer, number  # noqa: E402
from logra_core.kl_callback import KLControlCallback  # noqa: E402
from logra_core.tasks import make_task, messages  # noqa: E402

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
    """Two reward functions as TRL calls them: the verifier's verdict, and closeness."""
    by_uid = {p.uid: p for p in problems}

    def verified(completions, uid, **_):
        return [float(g.correct) for g in task.grade([c[0]["content"] for c in completions], [by_uid[u] for u in uid])]

    def close(completions, uid, **_):
        return closeness([c[0]["content"] for c in completions], [by_uid[u].answer for u in uid])

    return [verified, close]


def test_five_grpo_steps_of_the_real_llm(tmp_path):
    """Accumulation, clipping and activation checkpointing as TRL has them; S = clip · G Aᵀ at each step, KL within budget, weights move."""
    options = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    task = make_task(TaskConfig(name="chain_sum", options=options, system_prompt="Answer with the number only."))
    problems = task.train(0, 16, 0)
    model, tokenizer = real_llm()
    logra = LoGRA(model, SketchConfig(rank=16), OptimConfig(update_ratio=1e-3))
    control = KLControlCallback(logra, KLConfig(schedule="constant", budget=5e-3), exact=True)
    args = GRPOConfig(tmp_path, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=4,
                      max_completion_length=8, bf16=False, save_strategy="no", **QUIET)  # fmt: skip
    assert args.gradient_checkpointing and args.max_grad_norm == 1.0  # TRL's defaults, wanted here
    data = Dataset.from_list([{"prompt": messages(p), "uid": p.uid} for p in problems])
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
    assert len(told) >= 3 and len(set([before, *moved])) == 1 + len(told)
    assert all(trainer.worst[i] <= TOLERANCE for i in told), trainer.worst
    assert [row["grad_norm"] for row in logs] == pytest.approx(trainer.norms, rel=1e-5, abs=0)
    assert all(math.isfinite(row["loss"]) for row in logs) and len({row["loss"] for row in logs}) > 2
    assert all(control.history[i]["exact_kl"] == pytest.approx(5e-3, rel=0.2) for i in told), control.history
    assert [row["kl/predicted_kl"] for row in logs] == [row["predicted_kl"] for row in control.history]
    task.close()
