"""What a batch of graded responses says: Pass@k on held-out problems, counts of verdicts, lengths. Pure functions for the log rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..engines.rollout import Rollouts
from .ppo import pass_at_k
from .tasks import Grade, Problem

EXAMPLES = 3  # responses kept in each evaluation row


def held_out(problems: list[Problem], samples: int, rollouts: Rollouts, grades: list[Grade]) -> dict[str, Any]:
    """Values of an evaluation row: `problems` holds each problem `samples` times in a row, with one response and grade each.

    Of a mixture also Pass@1 by task, and their mean over tasks ("macro").
    """
    right = [sum(g.correct for g in grades[start : start + samples]) for start in range(0, len(grades), samples)]
    passes = {str(k): sum(pass_at_k(samples, c, k) for c in right) / len(right) for k in sorted({1, samples})}
    shown = list(zip(problems, rollouts.texts, grades))[:EXAMPLES]
    examples = [{"prompt": p.prompt, "response": text, "status": g.status} for p, text, g in shown]
    counts = {"pass_at": passes, "problems": len(right), "samples": samples}
    by_task: dict[str, list[float]] = {}
    for problem, correct in zip(problems[::samples], right):
        by_task.setdefault(problem.meta.get("dataset", ""), []).append(correct / samples)
    if len(by_task) > 1:  # a mixture
        means = {name: sum(shares) / len(shares) for name, shares in sorted(by_task.items())}
        counts |= {"by_task": means, "macro": sum(means.values()) / len(means)}
    return counts | lengths(rollouts) | {"grades": statuses(grades), "examples": examples}


def statuses(grades: list[Grade]) -> dict[str, int]:
    """How many responses got each verdict."""
    return dict(sorted(Counter(g.status for g in grades).items()))


def lengths(rollouts: Rollouts) -> dict[str, float]:
    """Mean response length in tokens, and the share that ended by itself."""
    n = len(rollouts)
    return {"response_length": rollouts.tokens / n, "finish_share": sum(r == "stop" for r in rollouts.finish_reasons) / n}
