"""Error against cost of the estimators of q on the embedded policy's own responses: JVP, finite differences, score sketch. No test; prints a table.

The reference is the JVP in fp32. Cost is time in units of one forward pass of the same probe, the methods taken in turn so that a noisy minute
hits them all. The score sketch is drawn anew for each repeat, so its error has a spread. In bf16, also what rounding the branch's sum by chance costs
beside a plain sum, which loses a part of the KL.

    python tests/bench_kl.py [--responses 8] [--tokens 16] [--rank 64] [--repeats 8] [--out data/runs/kl_estimators.jsonl]
"""

import argparse
import copy
import dataclasses
import math
import statistics
import time
from unittest.mock import patch

import torch

from logra_core import LoGRA, ProbeBatch
from logra_core.engines.policy import load_policy
from logra_core.engines.rollout import SamplingConfig, TransformersRollout
from logra_core.kl import context_logits, probing, q_finite_difference, q_jvp
from logra_core.rl.ppo import sequence_logprobs
from logra_core.rl.runlog import RunLog
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.score import q_score_sketch

SAMPLES, FD_KL, BF16_KL = (1, 4, 16), (1e-5, 1e-4, 1e-3), 0.03


def make_problem(responses: int, tokens: int, rank: int):
    """(model, proposed update, probe): a policy-gradient step on sums, with alternating advantages."""
    model, tokenizer = load_policy()
    config = SketchConfig(rank=rank)
    engine = TransformersRollout(model, tokenizer, config.targets)
    chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in zip(range(12, 12 + 7 * responses, 7), range(95, 0, -3))]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=tokens), 0)
    padded = rollouts.padded(engine.pad_id)
    logra = LoGRA(model, config, OptimConfig(update_ratio=1e-3))
    advantages = torch.tensor([1.0, -1.0]).repeat(responses)[:responses]
    (-(sequence_logprobs(model, padded) * advantages[:, None]).sum() / rollouts.tokens).backward()
    return model, logra.propose(), ProbeBatch(*(padded[name] for name in ("input_ids", "attention_mask", "response_mask")))


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("responses", 8), ("tokens", 16), ("rank", 64), ("repeats", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="a new run log for every estimate")
    args = parser.parse_args()
    model, update, probe = make_problem(args.responses, args.tokens, args.rank)
    exact = q_jvp(model, update, probe)

    rounded = copy.deepcopy(model).to(torch.bfloat16)

    def forward(of=model):
        with torch.no_grad(), probing(of):
            context_logits(of, probe)

    def in_bf16(v):
        return q_finite_difference(rounded, update, probe, math.sqrt(BF16_KL / exact))

    def plain_sum(v):
        with patch("logra_core.kl.add_on_grid", lambda y, change, scale, generator: y + scale * change):
            return in_bf16(v)

    ways = {"forward": lambda v: forward(), "jvp": lambda v: q_jvp(model, update, probe)}
    ways |= {f"finite difference, KL {kl:g}": lambda v, kl=kl: q_finite_difference(model, update, probe, math.sqrt(kl / exact)) for kl in FD_KL}
    ways |= {f"score sketch, {n} samples": lambda v, n=n: q_score_sketch(model, dataclasses.replace(update, version=v), probe, n) for n in SAMPLES}
    ways |= {"forward, bf16": lambda v: forward(rounded), f"finite difference, bf16, KL {BF16_KL:g}": in_bf16, "the same by a plain sum": plain_sum}
    forward(), forward(rounded)
    found = {name: [] for name in ways}
    for repeat in range(args.repeats):
        for name, way in ways.items():
            found[name].append(timed(lambda way=way, repeat=repeat: way(repeat + 1)))
    base = statistics.median(seconds for _, seconds in found["forward"])
    print(f"SmolLM2-135M, fp32, CPU, {torch.get_num_threads()} threads, {args.responses} responses, {probe.contexts} contexts, rank {args.rank}")
    print(f"{'':<30}{'time / forward':>15}{'error of q, rms':>18}{'mean':>10}")
    for name, pairs in found.items():
        errors = [q / exact - 1 for q, _ in pairs if q is not None]
        cells = f"{math.sqrt(statistics.fmean(e * e for e in errors)):>18.4f}{statistics.fmean(errors):>10.4f}" if errors else ""
        print(f"{name:<30}{statistics.median(s for _, s in pairs) / base:>15.2f}{cells}")
    if args.out:
        with RunLog(args.out, {"seed": 0, "settings": {k: v for k, v in vars(args).items() if k != "out"}, "contexts": probe.contexts}) as log:
            for name, pairs in found.items():
                log.row("estimator", name=name, q=[q for q, _ in pairs], seconds=[s for _, s in pairs])


if __name__ == "__main__":
    main()
