"""Generated tokens per second of the two rollout engines in one run, on the same prompts. Not a test; prints a table.

    python tests/bench_rollout.py [--responses 48] [--tokens 16] [--repeats 5]

Both engines draw with their own random numbers, so lengths differ a little; tokens are counted as generated, the end token included.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from logra_core import SamplingConfig, SketchConfig, load_policy
from logra_core.rollout import TransformersRollout
from logra_core.rollout_vllm import VLLMRollout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("responses", 48), ("tokens", 16), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model, tokenizer = load_policy()
    chats = [
        [{"role": "system", "content": "Answer with the number only."}, {"role": "user", "content": f"What is {7 * i % 90 + 9} + {13 * i % 80}?"}]
        for i in range(args.responses)
    ]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    sampling = SamplingConfig(max_tokens=args.tokens)
    log = tempfile.mkstemp(suffix=".log")[1]
    engines = {"transformers": TransformersRollout(model, tokenizer, SketchConfig().targets), "vllm": VLLMRollout(log=log)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):  # interleaved; the first round warms up
        for name, engine in engines.items():
            start = time.perf_counter()
            made = engine.generate(prompts, sampling, repeat)
            if repeat:
                rates[name].append(made.tokens / (time.perf_counter() - start))
    print(f"SmolLM2-135M, CPU, {torch.get_num_threads()} threads, {args.responses} responses of at most {args.tokens} tokens")
    for name, values in rates.items():
        print(f"{name:<14}{statistics.median(values):>8.1f} tokens/s, median (best {max(values):.1f})")
    print(f"vllm / transformers: {statistics.median(rates['vllm']) / statistics.median(rates['transformers']):.2f}")
    engines["vllm"].close()


if __name__ == "__main__":
    main()
