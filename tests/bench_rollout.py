"""Generated tokens per second of the two rollout engines in one run, on the same prompts. Not a test; prints a table.

    python tests/bench_rollout.py [--responses 48] [--tokens 16 32 64 128] [--repeats 5] [--out data/runs/rollout_speed.jsonl]

tokens: the most that a response may have, one or several. Both engines draw with their own random numbers, so lengths differ a little;
tokens are counted as generated, the end token included.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from logra_core.engines.policy import load_policy
from logra_core.engines.rollout import SamplingConfig, TransformersRollout
from logra_core.engines.vllm_local import VLLMRollout
from logra_core.rl.runlog import RunLog
from logra_core.variants import SketchConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("responses", 48), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--out", help="a new run log for every time")
    args = parser.parse_args()
    model, tokenizer = load_policy()
    chats = [
        [{"role": "system", "content": "Answer with the number only."}, {"role": "user", "content": f"What is {7 * i % 90 + 9} + {13 * i % 80}?"}]
        for i in range(args.responses)
    ]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    log = tempfile.mkstemp(suffix=".log")[1]
    engines = {"transformers": TransformersRollout(model, tokenizer, SketchConfig().targets), "vllm": VLLMRollout(log=log)}
    print(f"SmolLM2-135M, CPU, {torch.get_num_threads()} threads, {args.responses} responses; tokens/s, median of {args.repeats}")
    print(f"{'at most':>7}{'made':>7}{'transformers':>14}{'vLLM':>8}{'vLLM / transformers':>21}")
    rows = []
    for most in args.tokens:
        made: dict[str, list[tuple[int, float]]] = {name: [] for name in engines}
        for repeat in range(args.repeats + 1):  # interleaved; the first round warms up
            for name, engine in engines.items():
                start = time.perf_counter()
                tokens = engine.generate(prompts, SamplingConfig(max_tokens=most), repeat).tokens
                if repeat:
                    made[name].append((tokens, time.perf_counter() - start))
        rates = {name: statistics.median(n / s for n, s in pairs) for name, pairs in made.items()}
        mean = statistics.fmean(n for pairs in made.values() for n, _ in pairs) / args.responses
        print(f"{most:>7}{mean:>7.1f}{rates['transformers']:>14.1f}{rates['vllm']:>8.1f}{rates['vllm'] / rates['transformers']:>21.2f}", flush=True)
        rows += [{"engine": name, "max_tokens": most, "tokens": [n for n, _ in pairs], "seconds": [s for _, s in pairs]} for name, pairs in made.items()]
    if args.out:
        with RunLog(args.out, {"seed": 0, "settings": {k: v for k, v in vars(args).items() if k != "out"}}) as record:
            for row in rows:
                record.row("rollouts", **row)
    engines["vllm"].close()


if __name__ == "__main__":
    main()
