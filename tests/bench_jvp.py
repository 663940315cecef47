"""The KL probe in one run: the JVP as it is, with torch's unfused attention, with torch's own rules alone, and the finite difference. Not a test.

Prints median CPU times (of all threads: a busy machine stretches the clock, not them) and peak memory above the weights, for sequences of each
length whose last `--response` tokens are the contexts. A shallow copy of the embedded LLM; every layer costs the same.

    python tests/bench_jvp.py [--lengths 256 1024 4096] [--layers 4] [--rows 1] [--response 16] [--repeats 3] [--block 256]
"""

import argparse
import contextlib
import statistics
import time
from functools import partial

import torch
import torch.autograd.forward_ad as fw
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_core import LoGRA, ProbeBatch, kl
from logra_core.engines.policy import load_policy
from logra_core.kl import forward_mode
from logra_core.planning.memory import TrackMemory
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants import attention as blockwise
from logra_core.variants.attention import FrozenLinear

WAYS = ("blocks", "unfused", "torch", "difference")


@contextlib.contextmanager
def without(rule, model):
    """Forward mode with torch's unfused attention, and with `rule` for the linear layers."""
    with fw.dual_level(), sdpa_kernel(SDPBackend.MATH), rule():
        yield


FORWARD_MODES = {"blocks": forward_mode, "unfused": partial(without, FrozenLinear), "torch": partial(without, contextlib.nullcontext)}


def probing(way: str, model, update, probe: ProbeBatch) -> float:
    kl.forward_mode = FORWARD_MODES.get(way)
    return kl.q_finite_difference(model, update, probe, 0.1) if way == "difference" else kl.q_jvp(model, update, probe)


def measured(way: str, *given) -> tuple[float, float]:
    start = time.process_time()
    q = probing(way, *given)
    return q, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    for name, default in (("layers", 4), ("rows", 1), ("response", 16), ("repeats", 3), ("block", blockwise.BLOCK)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    blockwise.BLOCK = args.block
    model, _ = load_policy()
    model.model.layers = model.model.layers[: args.layers]
    logra = LoGRA(model, SketchConfig(rank=64), OptimConfig(update_ratio=1e-3))
    few = torch.randint(3, model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    model(input_ids=few, labels=few, use_cache=False).loss.backward()
    update = logra.propose()
    print(f"SmolLM2-135M, {args.layers} layers, fp32, {torch.get_num_threads()} threads, {args.rows} sequences, block {args.block}")
    print(f"{'tokens':>6}  {'':<11}{'CPU s':>10}{'/ difference':>14}{'/ torch':>11}{'peak MiB':>10}{'/ torch':>11}{'q / torch − 1':>17}")
    for tokens in args.lengths:
        ids = torch.randint(3, model.config.vocab_size, (args.rows, tokens), generator=torch.Generator().manual_seed(1))
        response = torch.zeros_like(ids, dtype=torch.bool)
        response[:, max(tokens - args.response, 1) :] = True
        probe, peaks, times, values = ProbeBatch(ids, torch.ones_like(ids), response), {}, {w: [] for w in WAYS}, {}
        for way in WAYS:
            with TrackMemory() as memory:
                probing(way, model, update, probe)
            peaks[way] = memory.peak
        for _ in range(args.repeats):  # interleaved, so that a noisy minute hits all of them
            for way in WAYS:
                values[way], seconds = measured(way, model, update, probe)
                times[way].append(seconds)
        median = {w: statistics.median(t) for w, t in times.items()}
        for way in WAYS:
            ratios = f"{median[way] / median['difference']:>14.2f}{median[way] / median['torch']:>11.2f}"
            memory = f"{peaks[way] / 2**20:>10.0f}{peaks[way] / peaks['torch']:>11.2f}"
            print(f"{tokens:>6}  {way:<11}{median[way]:>10.3f}{ratios}{memory}{values[way] / values['torch'] - 1:>17.1e}", flush=True)


if __name__ == "__main__":
    main()
