"""Time and peak memory of one training step in one run: all weights frozen, LoGRA, dense AdamW. Not a test; prints a table.

"products" is the floor of what LoGRA adds to the frozen pass: x Aᵀ, gᵀP and U A of every target by themselves, nothing else.

    python tests/bench_step.py [--rank 64] [--rows 4] [--tokens 256] [--repeats 5]
"""

import argparse
import gc
import statistics
import time

import torch

from logra_core import LoGRA, OptimConfig, SketchConfig, load_policy
from logra_core.memory import TrackMemory
from logra_core.sketch import select_targets


def make_step(method: str, model, ids, rank: int):
    """One forward, backward and update as a function, and the undo that takes its hooks off."""
    targets = select_targets(model, SketchConfig().targets)
    model.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, o: o.requires_grad_(True))
    undo = [hook.remove]
    if method == "logra":
        optimizer = LoGRA(model, SketchConfig(rank=rank), OptimConfig(update_ratio=1e-6))
        undo.append(optimizer.detach)
    elif method == "dense":
        weights = [m.weight.requires_grad_(True) for m in targets.values()]
        optimizer = torch.optim.AdamW(weights, lr=1e-8, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    else:
        optimizer = None

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step, lambda: [f() for f in undo]


def added_products(model, rank: int, count: int):
    """x Aᵀ, gᵀP and W − U A of every target on standing operands, as a function."""
    shapes = [tuple(m.weight.shape) for m in select_targets(model, SketchConfig().targets).values()]
    operands = {s: (torch.randn(count, s[1]), torch.randn(rank, s[1]), torch.randn(count, s[0]), torch.zeros(s)) for s in set(shapes)}

    def run():
        for shape in shapes:
            x_NK, A_RK, g_ND, W_DK = operands[shape]
            W_DK.addmm_(g_ND.T @ (x_NK @ A_RK.T), A_RK, alpha=-1e-9)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rank", 64), ("rows", 4), ("tokens", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model, _ = load_policy()
    ids = torch.randint(3, model.config.vocab_size, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0))
    methods = ("frozen", "logra", "dense")
    times = {m: [] for m in methods}
    peaks = {}
    for method in methods:
        step, undo = make_step(method, model, ids, args.rank)
        with TrackMemory() as peak:
            step()
            step()
        peaks[method] = peak.peak
        undo(), gc.collect()
    products, alone = added_products(model, args.rank, args.rows * args.tokens), []
    products()
    for _ in range(args.repeats):  # interleaved, so that a noisy minute hits all of them
        start = time.perf_counter()
        products()
        alone.append(time.perf_counter() - start)
        for method in methods:
            step, undo = make_step(method, model, ids, args.rank)
            step()
            start = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - start)
            undo(), gc.collect()
    median = {m: statistics.median(t) for m, t in times.items()}
    print(f"SmolLM2-135M, fp32, CPU, {torch.get_num_threads()} threads, {args.rows} x {args.tokens} tokens, rank {args.rank}")
    print(f"{'':<10}{'median s':>10}{'best s':>10}{'/ frozen':>10}{'/ dense':>10}{'peak MiB above weights':>25}")
    for m in methods:
        print(f"{m:<10}{median[m]:>10.3f}{min(times[m]):>10.3f}{median[m] / median['frozen']:>10.3f}{median[m] / median['dense']:>10.3f}{peaks[m] / 2**20:>25.0f}")
    floor = statistics.median(alone)
    print(f"{'products':<10}{floor:>10.3f}{min(alone):>10.3f}{floor / median['frozen']:>10.3f}{floor / median['dense']:>10.3f}")
    print(f"speed-up of LoGRA over dense AdamW: {median['dense'] / median['logra']:.3f}")


if __name__ == "__main__":
    main()
