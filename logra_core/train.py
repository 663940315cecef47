"""The training loop: tasks -> rollout -> grade -> advantages -> backward -> update -> sync -> log, with exact resume.

`Trainer(cfg).run()` or `python -m logra_core.train config.yaml [dotted.key=value ...]`. Belongs here: the order of things, the seeds,
the log rows. Methods are in methods.py, checkpoints in checkpoint.py, the algorithm in ppo.py. Every random choice is a function of
(seed, update, purpose), so a run killed at any moment resumes to the same bits (on the same machine and thread count).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

import torch
from tqdm.auto import tqdm

from . import checkpoint
from .config import ConfigError, SamplingConfig, TrainConfig, to_dict
from .configfile import load_config
from .kl import ProbeBatch
from .methods import checkpoint_activations, make_method
from .optim import NonFiniteError
from .policy import load_policy
from .ppo import RunningBaseline, mismatch, pass_at_k, ppo_loss, rewards_of, sequence_logprobs
from .rollout import Rollouts, make_engine, shared_prefix
from .runlog import RunLog, read_log, scrub
from .sync import SyncError, full_state_bytes
from .tasks import Grade, Problem, make_task, messages

EXAMPLES = 3  # responses kept in each evaluation row


def derive_seed(seed: int, update: int, purpose: str) -> int:
    """63-bit seed of one random choice."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{update}|{purpose}".encode()).digest()[:8], "big") >> 1


class Trainer:
    """One run of `cfg`. Construction loads policy, task and engine; `run` trains, or resumes what `cfg.out` holds."""

    def __init__(self, cfg: TrainConfig) -> None:
        s = cfg.sampling
        if s.temperature == 0 or s.top_p != 1:
            raise ConfigError(f"sampling temperature {s.temperature}, top_p {s.top_p}: training needs temperature > 0 and top_p 1")
        if cfg.method == "logra" and cfg.kl.temperature != s.temperature:
            raise ConfigError(f"kl.temperature = {cfg.kl.temperature}, sampling.temperature = {s.temperature}: must be equal")
        if cfg.threads:
            torch.set_num_threads(cfg.threads)
        self.cfg, self.out = cfg, Path(cfg.out)
        self.task = make_task(cfg.task)
        self.model, self.tokenizer = load_policy(cfg.model or None)
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {cfg.model!r} has no chat template; prompts are chat messages")
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        if cfg.gradient_checkpointing:
            checkpoint_activations(self.model)
        self.method = make_method(self.model, cfg)
        self.engine = make_engine(cfg)
        self.baseline = RunningBaseline(cfg.ppo.baseline_weight)
        self.seconds: Counter[str] = Counter()
        self._late: Counter[str] = Counter()  # seconds spent after an update's row was written (its checkpoint); shown in the next row
        self._before = 0.0  # seconds of earlier processes of this run
        self._rows = 0
        self.log = self._lock = None

    # ------------------------------------------------------------------ run and resume

    def run(self) -> dict[str, Any]:
        """Train to `cfg.updates`; returns the last row of the log (kind "end")."""
        cfg = self.cfg
        try:
            done = self._start()
            if done == cfg.updates and (rows := read_log(self.out / "log.jsonl")[1]) and rows[-1]["kind"] == "end":
                return rows[-1]
            self._clock = time.perf_counter()
            bar = tqdm(total=cfg.updates, initial=done, desc=f"{cfg.method} {cfg.task.name}", unit="update")
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
        self.engine.close()
        self.task.close()
        for held in (self.log, self._lock):
            if held is not None:
                held.close()

    def _start(self) -> int:
        """Open the log, restore the newest checkpoint if there is one, bring the engine into step. Returns the updates already done."""
        log, folder = self.out / "log.jsonl", self.out / "checkpoint"
        self._lock = checkpoint.lock(self.out)
        checkpoint.sweep(folder)
        found, done = checkpoint.latest(folder), 0
        if found is not None:
            done = self._restore(found)
            if done > self.cfg.updates:
                raise ConfigError(f"{found} is at update {done}; updates = {self.cfg.updates} lies before it")
            if not log.exists():
                raise checkpoint.CheckpointError(f"{found} has no log beside it: {log} is missing; remove the checkpoint to start over")
            finished = done == self.cfg.updates
            self.log = RunLog.resume(log, keep=lambda row: row["update"] <= done and (row["kind"] != "end" or finished))
            rows = [r for r in read_log(log)[1] if r["kind"] != "end"]
            if len(rows) != self._rows:
                raise checkpoint.CheckpointError(f"{log} has {len(rows)} rows up to update {done}, the checkpoint {self._rows}")
        else:
            if log.exists():
                self._only_restart(log)
                log.unlink()
            self.log = RunLog(log, self._header())
        self.engine.resync(full_state_bytes(self.method.weights, self.method.run_id, self.method.version))
        return done

    def _only_restart(self, log: Path) -> None:
        """A log without a checkpoint is of a run killed early, which starts over; refuse to overwrite anything else."""
        header, rows = read_log(log)
        if any(r["kind"] == "end" for r in rows):
            raise ConfigError(f"{log} is of a finished run without a checkpoint; choose another folder or remove it")
        if differ := checkpoint.differing_fields(header.get("config", {}), scrub(_json(to_dict(self.cfg)))):
            raise ConfigError(f"{log} is of another run: {'; '.join(differ)}; choose another folder or remove it")

    def _restore(self, path: Path) -> int:
        weights, state = checkpoint.load(path)
        if differ := checkpoint.differing_fields(json.loads(state["config"]), _json(to_dict(self.cfg))):
            raise ConfigError(f"cannot resume {path} with other settings: {'; '.join(differ)}")
        if state["frozen"] != checkpoint.frozen_digest(self.model, self.method.weights):
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
            "frozen": checkpoint.frozen_digest(self.model, self.method.weights),
            "rows": self._rows,
            "elapsed": self._elapsed(),
            "threads": torch.get_num_threads(),
        }
        masters = {n: self.method.weights.master(n) for n in self.method.weights.modules}
        checkpoint.save(self.out / "checkpoint", update, masters, state)
        self._late["checkpoint"] += time.perf_counter() - started

    # ------------------------------------------------------------------ one update

    def _update(self, update: int) -> dict[str, Any]:
        cfg, method = self.cfg, self.method
        started = time.perf_counter()
        self.seconds, self._late = self._late, Counter()
        problems = self.task.train(update - 1, cfg.ppo.prompts_per_update, cfg.seed)
        rollouts = self._generate(problems, cfg.sampling, derive_seed(cfg.seed, update, "rollout"))
        with self._phase("grade"):
            grades = self.task.grade(rollouts.texts, problems)
        rewards = rewards_of([g.correct for g in grades], cfg.ppo.failure_reward)
        advantages, baseline = self.baseline.advantages(rewards), self.baseline.value
        try:
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
            (self.engine.resync if message.full else self.engine.sync)(message.data)
        self.seconds["total"] = time.perf_counter() - started
        return self._row(
            "update", update=update, version=method.version, reward_rate=sum(g.correct for g in grades) / len(grades), baseline=baseline,
            advantage=float(advantages.double().mean()), grades=_statuses(grades), tokens=rollouts.tokens, **_lengths(rollouts),
            **stats, grad_norm=grad_norm, **method.metrics(), exact_kl=measured,
            payload_bytes=len(message.data), full_weights_bytes=4 * sum(m.weight.numel() for m in method.weights.modules.values()),
        )  # fmt: skip

    def _backward(self, update: int, rollouts: Rollouts, advantages: torch.Tensor) -> dict[str, float]:
        """Accumulate the batch's gradient, a microbatch at a time (like lengths together). Returns loss, TIS and mismatch figures."""
        cfg, loss_sum, peak, sums, seen = self.cfg.ppo, 0.0, 0.0, Counter(), []
        order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts.response_ids[i]) + len(rollouts.prompt_ids[i]), i))
        finished = torch.tensor([r == "stop" for r in rollouts.finish_reasons])
        for start in range(0, len(order), cfg.microbatch):
            rows = order[start : start + cfg.microbatch]
            part = rollouts.select(rows)
            shared = 0 if self.cfg.gradient_checkpointing else shared_prefix(part.prompt_ids)
            padded = part.padded(self.pad_id, skip=shared)
            mask, rollout_logp = padded["response_mask"], padded["rollout_logprobs"]
            logp = sequence_logprobs(self.model, padded, self.cfg.sampling.temperature, part.prompt_ids[0][:shared], cfg.logit_chunk)
            moved = (x.to(logp.device) for x in (rollout_logp, advantages[rows], mask))
            loss, stats = ppo_loss(logp, *moved, rollouts.tokens, cfg.clip, cfg.tis_cap)
            if not math.isfinite(loss.item()):
                raise NonFiniteError(f"loss of microbatch {start // cfg.microbatch} is {loss.item()}")
            loss.backward()
            loss_sum += loss.item()
            peak = max(peak, stats.pop("tis_max"))
            sums.update(stats)
            seen.append((rollout_logp[mask], logp.detach().cpu()[mask], finished[rows].repeat_interleave(mask.sum(1))))
        rolled, trained, ended = (torch.cat(parts) for parts in zip(*seen))  # one row a token
        gap = mismatch(rolled[:, None], trained[:, None], torch.ones(len(rolled), 1, dtype=torch.bool), ended)
        n = rollouts.tokens
        return {
            "loss": loss_sum, "tis_mean": sums["tis_sum"] / n, "tis_max": peak, "tis_capped": sums["tis_capped"] / n,
            "mismatch": gap, "logprob": float(trained.double().mean()),
        }  # fmt: skip

    def _probe(self, update: int, rollouts: Rollouts) -> ProbeBatch:
        """Contexts of the KL prediction: `kl.probe_responses` responses of the batch, drawn by (seed, update)."""
        generator = torch.Generator().manual_seed(derive_seed(self.cfg.seed, update, "probe"))
        chosen = sorted(torch.randperm(len(rollouts), generator=generator)[: self.cfg.kl.probe_responses].tolist())
        padded = rollouts.select(chosen).padded(self.pad_id)
        device = self.model.get_input_embeddings().weight.device
        return ProbeBatch(*(padded[k].to(device) for k in ("input_ids", "attention_mask", "response_mask")))

    def _generate(self, problems: list[Problem], sampling: SamplingConfig, seed: int) -> Rollouts:
        with self._phase("sync"):
            if (theirs := self.engine.fingerprint()) != (ours := self.method.weights.fingerprint()):
                raise SyncError(f"before a rollout at version {self.method.version}: engine weights {theirs}, trainer {ours}")
        with self._phase("rollout"):
            template = self.tokenizer.apply_chat_template
            prompts = [template(messages(p), add_generation_prompt=True, tokenize=True, return_dict=False) for p in problems]
            return self.engine.generate(prompts, sampling, seed, expected_version=self.method.version)

    def _evaluate(self, update: int) -> None:
        """Held-out Pass@1 and Pass@k with the same problems and seed at every evaluation."""
        cfg = self.cfg
        started = time.perf_counter()
        problems = self.task.heldout(cfg.eval_problems)
        repeated = [p for p in problems for _ in range(cfg.eval_samples)]
        rollouts = self._generate(repeated, cfg.eval_sampling, derive_seed(cfg.seed, 0, "eval"))
        grades = self.task.grade(rollouts.texts, repeated)
        n, right = cfg.eval_samples, [0] * len(problems)
        for i, grade in enumerate(grades):
            right[i // n] += grade.correct
        passes = {str(k): sum(pass_at_k(n, c, k) for c in right) / len(right) for k in sorted({1, n})}
        shown = list(zip(repeated, rollouts.texts, grades))[:EXAMPLES]
        examples = [{"prompt": p.prompt, "response": text, "status": g.status} for p, text, g in shown]
        self.seconds = Counter(eval=time.perf_counter() - started)
        self._row(
            "eval", update=update, version=self.method.version, pass_at=passes, problems=len(problems), samples=n, **_lengths(rollouts),
            grades=_statuses(grades), examples=examples,
        )  # fmt: skip
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
        counts = {"trained_weights": sum(m.weight.numel() for m in layers), "trained_layers": len(layers)}
        return {"config": to_dict(self.cfg), "seed": self.cfg.seed, "task_counts": self.task.counts} | counts

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


def _json(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _statuses(grades: list[Grade]) -> dict[str, int]:
    return dict(sorted(Counter(g.status for g in grades).items()))


def _lengths(rollouts: Rollouts) -> dict[str, float]:
    n = len(rollouts)
    return {"response_length": rollouts.tokens / n, "finish_share": sum(r == "stop" for r in rollouts.finish_reasons) / n}


# ---------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m logra_core.train config.yaml|json [dotted.key=value ...]")
        return 0 if arguments else 2
    try:
        cfg = load_config(arguments[0], arguments[1:])
        end = Trainer(cfg).run()
    except (ConfigError, FileNotFoundError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before, after = (", ".join(f"Pass@{k} {v:.3f}" for k, v in end[f"pass_at_{w}"].items()) for w in ("before", "after"))
    print(f"{cfg.out}: {before} before, {after} after {end['update']} updates, {end['elapsed']:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
