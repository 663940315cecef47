"""Time and peak memory of one training step in one run: all weights frozen, LoGRA, dense AdamW, LoRA, GaLore. Not a test; prints a table.

GaLore's first step, with the SVD of every gradient, is timed once and shared out over the `--gap` steps that its subspace lasts.
"products" is the floor of what LoGRA adds to the frozen pass: x Aᵀ, gᵀP and U A of every target by themselves, nothing else.

    python tests/bench_step.py [--rank 64] [--rows 4] [--tokens 256] [--repeats 5] [--gap 200] [--out data/runs/step_time.jsonl]
"""

import argparse
import gc
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model

from logra_core import LoGRA
from logra_core.engines.policy import load_policy
from logra_core.planning.memory import TrackMemory
from logra_core.rl.methods import compact, galore_adamw
from logra_core.rl.runlog import RunLog
from logra_core.rl.settings import GaLoreConfig
from logra_core.sketch import select_targets
from logra_core.variants import OptimConfig, SketchConfig

METHODS = ("frozen", "logra", "dense", "lora", "galore")


def make_step(method: str, model, ids, rank: int, kept: dict):
    """One forward, backward and update as a function, and the undo that takes its hooks off. kept: GaLore's optimizer, from call to call."""
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
    elif method == "galore":
        weights = [m.weight.requires_grad_(True) for m in targets.values()]
        optimizer = kept.setdefault(method, galore_adamw(weights, GaLoreConfig(lr=1e-8, rank=rank)))
    elif method == "lora":
        adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=list(targets)))
        undo.append(adapted.unload)
        factors = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(factors, lr=1e-8, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    else:
        optimizer = None

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            if method == "galore":
                compact(optimizer)
            optimizer.zero_grad()

    return step, lambda: [f() for f in undo]


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def added_products(model, rank: int, count: int):
    """x Aᵀ, gᵀP and W − U A of every target on standing operands, as a function."""
    shapes = [tuple(m.weight.shape) for m in select_targets(model, SketchConfig().targets).values()]
    operands = {s: (torch.randn(count, s[1]), torch.randn(rank, s[1]), torch.randn(count, s[0]), torch.zeros(s)) for s in set(shapes)}

    def run():
        for shape in shapes:
            x_NK, A_RK, g_ND, W_DK = operands[shape]
            W_DK.addmm_(g_ND.T @ (x_NK @ A_RK.T), A_RK, alpha=-1e-9)

    return run


def added_flops(model, rank: int, count: int) -> tuple[float, float]:
    """Multiply-adds of those products over the multiply-adds of the frozen pass (forward and input gradients of all linear layers, attention left
    out), as they are, and with one x Aᵀ for the layers that share their input (`share_inputs`)."""
    shapes = {n: tuple(m.weight.shape) for n, m in select_targets(model, SketchConfig().targets).items()}
    frozen = 2 * count * (sum(d * k for d, k in shapes.values()) + model.get_output_embeddings().weight.numel())
    inputs = {n.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj"): k for n, (_, k) in shapes.items()}
    rest = sum(count * rank * d + rank * d * k for d, k in shapes.values())  # gᵀP and U A
    return tuple((rest + count * rank * sum(ks)) / frozen for ks in ([k for _, k in shapes.values()], inputs.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rank", 64), ("rows", 4), ("tokens", 256), ("repeats", 5), ("gap", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="a new run log for every time and peak")
    args = parser.parse_args()
    model, _ = load_policy()
    ids = torch.randint(3, model.config.vocab_size, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0))
    times, peaks = {m: [] for m in METHODS}, {}
    for method in METHODS:
        with TrackMemory() as peak:
            step, undo = make_step(method, model, ids, args.rank, {})
            step()
            step()
        peaks[method] = peak.peak
        undo(), gc.collect()
    kept: dict = {}
    step, undo = make_step("galore", model, ids, args.rank, kept)
    first = timed(step)
    undo(), gc.collect()
    products, alone = added_products(model, args.rank, args.rows * args.tokens), []
    products()
    for _ in range(args.repeats):  # interleaved, so that a noisy minute hits all of them
        alone.append(timed(products))
        for method in METHODS:
            step, undo = make_step(method, model, ids, args.rank, kept)
            step()
            times[method].append(timed(step))
            undo(), gc.collect()
    median = {m: statistics.median(t) for m, t in times.items()}
    print(f"SmolLM2-135M, fp32, CPU, {torch.get_num_threads()} threads, {args.rows} x {args.tokens} tokens, rank {args.rank}")
    print(f"{'':<10}{'median s':>10}{'best s':>10}{'/ frozen':>10}{'/ dense':>10}{'peak MiB above weights':>25}{'/ dense':>10}")
    for m in METHODS:
        ratios = f"{median[m] / median['frozen']:>10.3f}{median[m] / median['dense']:>10.3f}"
        print(f"{m:<10}{median[m]:>10.3f}{min(times[m]):>10.3f}{ratios}{peaks[m] / 2**20:>25.0f}{peaks[m] / peaks['dense']:>10.3f}")
    floor = statistics.median(alone)
    print(f"{'products':<10}{floor:>10.3f}{min(alone):>10.3f}{floor / median['frozen']:>10.3f}{floor / median['dense']:>10.3f}")
    each, shared = added_flops(model, args.rank, args.rows * args.tokens)
    print(f"by operations alone these products are {each:.1%} of the frozen pass, {shared:.1%} with shared inputs: no step takes less than that more")
    whole = median["galore"] + (first - median["galore"]) / args.gap
    print(f"GaLore's step with its SVDs {first:.3f} s; the mean over {args.gap} steps {whole:.3f} s, {whole / median['dense']:.3f} of dense")
    print(f"speed-up of LoGRA over dense AdamW {median['dense'] / median['logra']:.3f}, LoRA {median['lora'] / median['logra']:.3f}, "
          f"GaLore {whole / median['logra']:.3f}")  # fmt: skip
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        with RunLog(args.out, {"seed": 0, "settings": settings}) as log:
            for m in METHODS:
                log.row("step", method=m, seconds=times[m], peak_bytes=peaks[m])
            log.row("products", seconds=alone)
            log.row("galore_first", seconds=first)


if __name__ == "__main__":
    main()
