"""The training loop: tasks -> rollout -> grade -> advantages -> backward -> update -> sync -> log, with exact resume.

`Trainer(cfg).run()` or `python -m logra_core.rl.train config.yaml [dotted.key=value ...]`; under `torchrun -m logra_core.rl.train` the same run
on several processes (distributed.py). Belongs here: the order of things, the seeds, the log rows. Methods are in methods.py,
files of checkpoints in checkpoint.py, the algorithm in ppo.py. Every random choice is a function of (seed, update, purpose), so a run killed at any
moment resumes to the same bits (on the same machine and thread count).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import resource
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any, Iterator

import torch
from tqdm.auto import tqdm

from ..engines.policy import load_policy
from ..engines.rollout import RolloutEngine, Rollouts, SamplingConfig, refuse_padding
from ..kl import ProbeBatch
from ..optim import NonFiniteError
from ..settings import ConfigError, to_dict
from ..sync import SyncError, full_state_bytes
from . import checkpoint
from .engine import make_engine, refuse_large_state
from .evaluation import held_out, lengths, statuses
from .methods import Message, Method, checkpoint_activations, make_method
from .ppo import RunningBaseline, mismatch, ppo_loss, rewards_of, sequence_logprobs
from .runlog import RunLog, read_log, scrub
from .settings import TrainConfig
from .tasks import Grade, Problem, make_task, messages


def config_digest(cfg: TrainConfig) -> str:
    """16 hexadecimal digits of the settings that may not change in a run, with paths whole: a log's header keeps only parts of those."""
    values = checkpoint.as_json(to_dict(cfg))
    for name in checkpoint.FREE:
        *parents, last = name.split(".")
        functools.reduce(dict.__getitem__, parents, values).pop(last)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def refuse_another_run(log: Path, header: dict[str, Any], cfg: TrainConfig) -> None:
    """Raises ConfigError, naming what differs, if the log's header is of a run with other settings than `cfg`.

    The header's own paths depend on the folder that its writer worked in, so its digest decides; old headers have none.
    """
    digest = header.get("config_digest")
    if digest == config_digest(cfg):
        return
    differ = checkpoint.differing_fields(header.get("config", {}), scrub(checkpoint.as_json(to_dict(cfg))))
    if digest and not differ:
        differ = ["a path in its settings, such as model, of which the log keeps only the end"]
    if differ:
        raise ConfigError(f"{log} is of another run: {'; '.join(differ)}; choose another folder or remove it")


class Resumable:
    """Base of `Trainer`, which sets these."""

    cfg: TrainConfig
    out: Path
    model: torch.nn.Module
    method: Method
    engine: RolloutEngine
    baseline: RunningBaseline
    log: RunLog | None
    _lock: IO | None
    _late: Counter
    _before: float
    _rows: int

    def _start(self) -> int:
        """Open the log, restore the newest checkpoint if there is one, bring the engine into step. Returns the updates already done."""
        found, done = self._find(), 0
        if found is not None:
            done = self._restore(found)
            if done > self.cfg.updates:
                raise ConfigError(f"{found} is at update {done}; updates = {self.cfg.updates} lies before it")
        self._open_log(found, done)
        self._resync()
        return done

    def _find(self) -> Path | None:
        """Hold the run's folder, clear it of what a killed process left, return its newest checkpoint."""
        self._lock = checkpoint.lock(self.out)
        checkpoint.sweep(self.out / "checkpoint")
        return checkpoint.latest(self.out / "checkpoint")

    def _open_log(self, found: Path | None, done: int) -> None:
        log = self.out / "log.jsonl"
        if found is not None:
            if not log.exists():
                raise checkpoint.CheckpointError(f"{found} has no log beside it: {log} is missing; remove the checkpoint to start over")
            finished = done == self.cfg.updates
            self.log = RunLog.resume(log, keep=lambda row: row["update"] <= done and (row["kind"] != "end" or finished))
            rows = [r for r in read_log(log)[1] if r["kind"] != "end"]
            if len(rows) != self._rows:
                raise checkpoint.CheckpointError(f"{log} has {len(rows)} rows up to update {done}, the checkpoint {self._rows}")
        elif log.exists() and self._finished(log):
            self.log = RunLog.resume(log)
        else:
            log.unlink(missing_ok=True)
            self.log = RunLog(log, self._header())

    def _resync(self) -> None:
        self.engine.resync(full_state_bytes(self.method.weights, self.method.run_id, self.method.version))

    def _finished(self, log: Path) -> bool:
        """Of a log without a checkpoint: a run killed early, which starts over, or one of no updates, which is done. Refuses anything else."""
        header, rows = read_log(log)
        finished = any(r["kind"] == "end" for r in rows)
        if finished and not rows[-1]["update"] == self.cfg.updates == 0:
            raise ConfigError(f"{log} is of a finished run without a checkpoint; choose another folder or remove it")
        refuse_another_run(log, header, self.cfg)
        return finished

    def _restore(self, path: Path) -> int:
        weights, state = self._load(path)
        if differ := checkpoint.differing_fields(json.loads(state["config"]), checkpoint.as_json(to_dict(self.cfg))):
            raise ConfigError(f"cannot resume {path} with other settings: {'; '.join(differ)}")
        if state["frozen"] != self._frozen():
            raise checkpoint.CheckpointError(f"{path} is of another model: its frozen weights differ from those of {self.cfg.model!r}")
        if set(weights) != set(self.method.weights.modules):
            raise checkpoint.CheckpointError(f"{path} holds {len(weights)} weights; this run trains others")
        if state["threads"] != torch.get_num_threads():
            tqdm.write(f"resuming with {torch.get_num_threads()} threads what ran with {state['threads']}: last bits may differ")
        self.method.load_state_dict(state["method"])
        with torch.no_grad():
            for name, value in weights.items():
                self.method.weights.set_(name, value)
        if (ours := self.method.weights.fingerprint()) != state["fingerprint"]:
            raise checkpoint.CheckpointError(f"{path}: restored weights have fingerprint {ours}, saved {state['fingerprint']}; damaged")
        self.baseline.load_state_dict(state["baseline"])
        self._before, self._rows = state["elapsed"], state["rows"]
        return int(state["update"])

    def _save(self, update: int) -> None:
        started = time.perf_counter()
        state = {
            "config": json.dumps(to_dict(self.cfg)),
            "method": self.method.state_dict(),
            "baseline": self.baseline.state_dict(),
            "fingerprint": self.method.weights.fingerprint(),
            "frozen": self._frozen(),
            "rows": self._rows,
            "elapsed": self._elapsed(),
            "threads": torch.get_num_threads(),
        }
        self._write(update, state)
        self._late["checkpoint"] += time.perf_counter() - started

    def _frozen(self) -> str:
        return checkpoint.frozen_digest(self.model, self.method.trained())

    def _load(self, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return checkpoint.load(path)

    def _write(self, update: int, state: dict[str, Any]) -> None:
        weights = {n: self.method.weights.stored(n) for n in self.method.weights.modules}
        checkpoint.save(self.out / "checkpoint", update, weights, state)


def derive_seed(seed: int, update: int, purpose: str) -> int:
    """63-bit seed of one random choice."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{update}|{purpose}".encode()).digest()[:8], "big") >> 1


class Trainer(Resumable):
    """One run of `cfg`. Construction loads policy, task and engine; `run` trains, or resumes what `cfg.out` holds."""

    def __init__(self, cfg: TrainConfig) -> None:
        s = cfg.sampling
        if s.temperature == 0 or s.top_p != 1:
            raise ConfigError(f"sampling temperature {s.temperature}, top_p {s.top_p}: training needs temperature > 0 and top_p 1")
        controlled = cfg.method == "logra" or (cfg.method == "dense" and cfg.dense.kl_control)
        if controlled and cfg.kl.temperature != s.temperature:
            raise ConfigError(f"kl.temperature = {cfg.kl.temperature}, sampling.temperature = {s.temperature}: must be equal")
        if cfg.threads:
            torch.set_num_threads(cfg.threads)
        self.cfg, self.out = cfg, Path(cfg.out)
        self.log = self._lock = self.task = self.engine = None
        self.quiet = False
        self.share_prefix = not cfg.gradient_checkpointing  # compute the common beginning of a microbatch's prompts once
        self._before_loading()
        self.model, self.tokenizer = load_policy(cfg.model or None, cfg.weight_dtype)
        refuse_padding(self.model)
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {cfg.model!r} has no chat template; prompts are chat messages")
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        if cfg.gradient_checkpointing:
            checkpoint_activations(self.model)
        self._after_loading()
        refuse_large_state(cfg, self._full_bytes())
        self.baseline = RunningBaseline(cfg.ppo.baseline_weight)
        self.seconds: Counter[str] = Counter()
        self._late: Counter[str] = Counter()  # seconds spent after an update's row was written (its checkpoint); shown in the next row
        self._before = 0.0  # seconds of earlier processes of this run
        self._rows = 0

    def _before_loading(self) -> None:
        if self.cfg.compute_dtype != self.cfg.weight_dtype:
            raise ConfigError(f"compute_dtype = {self.cfg.compute_dtype!r} needs torchrun (one process will do); here float32 is allowed")
        self.task = make_task(self.cfg.task)

    def _after_loading(self) -> None:
        self.method = make_method(self.model, self.cfg)
        self.engine = make_engine(self.cfg)

    # ------------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        """Train to `cfg.updates`; returns the last row of the log (kind "end")."""
        cfg = self.cfg
        try:
            done = self._start()
            if done == cfg.updates and (rows := read_log(self.out / "log.jsonl")[1]) and rows[-1]["kind"] == "end":
                return rows[-1]
            self._clock = time.perf_counter()
            bar = tqdm(total=cfg.updates, initial=done, desc=f"{cfg.method} {cfg.task.name}", unit="update", disable=self.quiet)
            if done == 0:
                self._evaluate(0)
            for update in range(done + 1, cfg.updates + 1):
                row = self._update(update)
                bar.set_postfix(reward=f"{row['reward_rate']:.2f}", alpha=f"{row['alpha']:.2g}", refresh=False)
                bar.update()
                if update == cfg.updates or (cfg.eval_every and update % cfg.eval_every == 0):
                    self._evaluate(update)
                if update == cfg.updates or update % cfg.checkpoint_every == 0:
                    self._save(update)
            bar.close()
            return self._row("end", update=cfg.updates, **self._summary())
        finally:
            self.close()

    def close(self) -> None:
        """Release the engine, the graders and the log."""
        for held in (self.engine, self.task, self.log, self._lock):
            if held is not None:
                held.close()

    # ------------------------------------------------------------------ one update

    def _update(self, update: int) -> dict[str, Any]:
        cfg, method = self.cfg, self.method
        started = time.perf_counter()
        self.seconds, self._late = self._late, Counter()
        rollouts, grades = self._respond(update)
        rewards = rewards_of([g.correct for g in grades], cfg.ppo.failure_reward)
        advantages, baseline = self.baseline.advantages(rewards), self.baseline.value
        try:
            with self._phase("score"):
                method.observe(rollouts, self.pad_id)
            with self._phase("forward_backward"):
                stats = self._backward(update, rollouts, advantages)
            grad_norm = method.grad_norm()
            with self._phase("update"):
                proposed = method.propose()
            with self._phase("probe"):
                probe = self._probe(update, rollouts)
                alpha = method.scale(proposed, probe, stats["mismatch"])
            measured = None
            if cfg.exact_kl_every and update % cfg.exact_kl_every == 0:
                with self._phase("exact_kl"):
                    measured = method.exact_kl(proposed, probe, alpha)
        except NonFiniteError as error:
            method.zero_grad()
            raise NonFiniteError(f"update {update} was not taken: {error}") from error
        with self._phase("update"):
            message = method.apply(proposed, alpha)
        self.baseline.observe(rewards)
        with self._phase("sync"):
            self._send(message)
        self.seconds["total"] = time.perf_counter() - started
        return self._row(
            "update", update=update, version=method.version, reward_rate=sum(g.correct for g in grades) / len(grades), baseline=baseline,
            advantage=float(advantages.double().mean()), grades=statuses(grades), tokens=rollouts.tokens, **lengths(rollouts),
            **stats, grad_norm=grad_norm, **method.metrics(), exact_kl=measured,
            payload_bytes=len(message.data),
            full_weights_bytes=self._full_bytes(),
        )  # fmt: skip

    def _respond(self, update: int) -> tuple[Rollouts, list[Grade]]:
        """The batch of an update and its verdicts."""
        problems = self.task.train(update - 1, self.cfg.ppo.prompts_per_update, self.cfg.seed)
        rollouts = self._generate(problems, self.cfg.sampling, derive_seed(self.cfg.seed, update, "rollout"))
        with self._phase("grade"):
            return rollouts, self.task.grade(rollouts.texts, problems)

    def _send(self, message: Message) -> None:
        (self.engine.resync if message.full else self.engine.sync)(message.data)

    def _backward(self, update: int, rollouts: Rollouts, advantages: torch.Tensor) -> dict[str, float]:
        """Accumulate the batch's gradient, a microbatch at a time (like lengths together). Returns loss, TIS and mismatch figures."""
        size, loss_sum, peak, sums, seen = self.cfg.ppo.microbatch, 0.0, 0.0, Counter(), []
        order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts.response_ids[i]) + len(rollouts.prompt_ids[i]), i))
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        for number, (loss, stats, tokens) in enumerate(self._microbatches(rollouts, advantages, groups)):
            if not math.isfinite(loss):
                raise NonFiniteError(f"loss of microbatch {number} is {loss}")
            loss_sum += loss
            peak = max(peak, stats.pop("tis_max"))
            sums.update(stats)
            seen.append(tokens)
        rolled, trained, ended = (torch.cat(parts) for parts in zip(*seen))  # one row a token
        gap = mismatch(rolled[:, None], trained[:, None], torch.ones(len(rolled), 1, dtype=torch.bool), ended)
        n = rollouts.tokens
        return {
            "loss": loss_sum, "tis_mean": sums["tis_sum"] / n, "tis_max": peak, "tis_capped": sums["tis_capped"] / n,
            "mismatch": gap, "logprob": float(trained.double().mean()),
        }  # fmt: skip

    def _microbatches(self, rollouts: Rollouts, advantages: torch.Tensor, groups: list[list[int]]) -> Iterator[tuple]:
        """What `_microbatch` returns for each group of rows, in order."""
        return (self._microbatch(rollouts, advantages, rows) for rows in groups)

    def _microbatch(self, rollouts: Rollouts, advantages: torch.Tensor, rows: list[int]) -> tuple[float, dict, tuple]:
        """Forward and backward of some rows. Returns the loss, sums of `ppo_loss`, and a token each: rollout and trainer log-prob, finished."""
        cfg, part = self.cfg.ppo, rollouts.select(rows)
        shared = part.shared(self.model) if self.share_prefix else 0
        padded = part.padded(self.pad_id, skip=shared)
        mask, rollout_logp = padded["response_mask"], padded["rollout_logprobs"]
        logp = sequence_logprobs(self.model, padded, self.cfg.sampling.temperature, part.prompt_ids[0][:shared], cfg.logit_chunk)
        moved = (x.to(logp.device) for x in (rollout_logp, advantages[rows], mask))
        loss, stats = ppo_loss(logp, *moved, rollouts.tokens, cfg.clip, cfg.tis_cap)
        loss.backward()
        ended = torch.tensor([r == "stop" for r in part.finish_reasons]).repeat_interleave(mask.sum(1))
        return loss.item(), stats, (rollout_logp[mask], logp.detach().cpu()[mask], ended)

    def _probe(self, update: int, rollouts: Rollouts) -> ProbeBatch:
        """Contexts of the KL prediction: `kl.probe_responses` responses of the batch, drawn by (seed, update)."""
        generator = torch.Generator().manual_seed(derive_seed(self.cfg.seed, update, "probe"))
        chosen = sorted(torch.randperm(len(rollouts), generator=generator)[: self.cfg.kl.probe_responses].tolist())
        return self._probe_of(rollouts, chosen)

    def _probe_of(self, rollouts: Rollouts, rows: list[int]) -> ProbeBatch:
        padded = rollouts.select(rows).padded(self.pad_id)
        device = self.model.get_input_embeddings().weight.device
        return ProbeBatch(*(padded[k].to(device) for k in ("input_ids", "attention_mask", "response_mask")))

    def _generate(self, problems: list[Problem], sampling: SamplingConfig, seed: int) -> Rollouts:
        with self._phase("sync"):
            if (theirs := self.engine.fingerprint()) != (ours := self.method.weights.fingerprint()):
                raise SyncError(f"before a rollout at version {self.method.version}: engine weights {theirs}, trainer {ours}")
        with self._phase("rollout"):
            return self.engine.generate(self._prompts(problems, sampling), sampling, seed, expected_version=self.method.version)

    def _prompt(self, problem: Problem) -> list[int]:
        return self.tokenizer.apply_chat_template(messages(problem), add_generation_prompt=True, tokenize=True, return_dict=False)

    def _left(self, sampling: SamplingConfig) -> float:
        """Tokens that a prompt may take."""
        return math.inf if self.engine.room is None else self.engine.room - sampling.max_tokens

    def _prompts(self, problems: list[Problem], sampling: SamplingConfig) -> list[list[int]]:
        """Token ids of every prompt. Raises ConfigError, naming the question, for one that leaves no room for a response."""
        made, left = [self._prompt(p) for p in problems], self._left(sampling)
        for problem, ids in zip(problems, made):
            if len(ids) > left:
                what, setting = ("held-out ", "eval_sampling") if sampling is self.cfg.eval_sampling else ("", "sampling")
                raise ConfigError(
                    f"{what}question {problem.prompt[:80]!r} takes {len(ids)} tokens; {setting}.max_tokens {sampling.max_tokens} leaves {left} of "
                    f"{self.engine.room}: allowed is a smaller {setting}.max_tokens (in a new run), or vLLM servers with a larger max_model_len"
                )
        return made

    def _fit_questions(self) -> int:
        """Held-out questions must fit; training ones that do not are dropped where all are known beforehand (MathTask). Returns how many were."""
        self._prompts(self.task.heldout(self.cfg.eval_problems), self.cfg.eval_sampling)
        pools, left = getattr(self.task, "_problems", {}), self._left(self.cfg.sampling)
        if "train" not in pools:  # made as they are drawn
            return 0
        kept = [p for p in pools["train"] if len(self._prompt(p)) <= left]
        count, dropped = len(pools["train"]), len(pools["train"]) - len(kept)
        words = f"do not fit: with sampling.max_tokens {self.cfg.sampling.max_tokens} their prompts exceed {self.engine.room} tokens"
        if not kept:
            raise ConfigError(f"TaskConfig.train_data: no training question is left, all {count} {words}")
        if dropped:
            tqdm.write(f"{dropped} of {count} training questions dropped, they {words}")
        pools["train"] = kept
        self.task.counts |= {"train_too_long": dropped, "train_kept": len(kept)}
        return dropped

    def _open_log(self, found: Path | None, done: int) -> None:
        log = self.out / "log.jsonl"
        if found is None or done < self.cfg.updates:
            now, header = self._fit_questions(), read_log(log)[0] if found is not None and log.exists() else {}
            if (before := header.get("task_counts", {}).get("train_too_long", now)) != now:
                raise ConfigError(f"{log} began without {before} questions that were too long, now {now} are: give the engine its old max_model_len")
        super()._open_log(found, done)

    def _evaluate(self, update: int) -> None:
        """Held-out Pass@1 and Pass@k with the same problems and seed at every evaluation."""
        cfg = self.cfg
        started = time.perf_counter()
        problems = self.task.heldout(cfg.eval_problems)
        repeated = [p for p in problems for _ in range(cfg.eval_samples)]
        rollouts = self._generate(repeated, cfg.eval_sampling, derive_seed(cfg.seed, 0, "eval"))
        values = held_out(repeated, cfg.eval_samples, rollouts, self.task.grade(rollouts.texts, repeated))
        self.seconds = Counter(eval=time.perf_counter() - started)
        self._row("eval", update=update, version=self.method.version, fingerprint=self.engine.fingerprint(), **values)
        passes = values["pass_at"]
        tqdm.write(f"update {update}: held-out " + ", ".join(f"Pass@{k} {v:.3f}" for k, v in passes.items()))

    # ------------------------------------------------------------------ log

    def _row(self, kind: str, **values: Any) -> dict[str, Any]:
        """Write a row. What depends on time or process stands under "seconds", "elapsed" and "peak_rss_mib"; the rest is exact."""
        values |= {
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "elapsed": round(self._elapsed(), 3),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        self._rows += kind != "end"
        return self.log.row(kind, **values)

    def _header(self) -> dict[str, Any]:
        layers = self.method.weights.modules.values()
        counts = {"trained_weights": sum(m.weight.numel() for m in layers), "trained_layers": len(layers), "task_counts": self.task.counts}
        return {"config": to_dict(self.cfg), "config_digest": config_digest(self.cfg), "seed": self.cfg.seed} | counts

    def _full_bytes(self) -> int:
        """Of all trained weights, as a full message holds them."""
        return sum(m.weight.numel() * m.weight.element_size() for m in self.method.weights.modules.values())

    def _summary(self) -> dict[str, Any]:
        evals = [r for r in read_log(self.out / "log.jsonl")[1] if r["kind"] == "eval"]
        before, after = evals[0]["pass_at"], evals[-1]["pass_at"]
        return {"pass_at_before": before, "pass_at_after": after, "fingerprint": self.method.weights.fingerprint()}

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._clock

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started
