"""What a GPU must confirm, in a few minutes on one card; not a test, since no machine must have one. Prints a report, exits 1 if a check fails.

    python tests/gpu_check.py [--device cuda] [--model ""] [--rank 256] [--rows 4] [--tokens 1024] [--vllm]

Projections and stochastic rounding have the CPU's bits; sketches equal the dense G Aᵀ; the JVP predicts the exact KL; an update in place keeps every data_ptr;
then time and the allocator's peak of one step: all weights frozen, LoGRA, dense AdamW. --vllm: an engine on the same card follows three
updates and serves bf16 of the masters in the same storages. Nothing here has run on a GPU yet: figures belong to whoever runs it.
"""

import argparse
import math
import statistics
import sys
import time

import torch

from logra_core import LoGRA, ProbeBatch, ProjectionSpec, exact_kl, full_state_bytes, make_projection
from logra_core.engines.policy import load_policy
from logra_core.kl import q_jvp
from logra_core.sketch import select_targets
from logra_core.variants import OptimConfig, SketchConfig
from logra_core.variants.rounding import Rounding, stochastic_round

failed: list[str] = []


def check(what: str, value: float, limit: float) -> None:
    print(f"{'ok' if value <= limit else 'FAILED':<8}{what}: {value:.3g} (at most {limit:g})")
    if not value <= limit:
        failed.append(what)


def loss_of(model, ids: torch.Tensor) -> torch.Tensor:
    logp = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
    return -logp.gather(-1, ids[:, 1:, None]).mean()


def exactness(model, ids: torch.Tensor, rank: int, device: torch.device) -> LoGRA:
    for kind in ("rademacher", "gaussian", "orthonormal"):
        spec = ProjectionSpec(0, 3, rank, kind)
        differ = (make_projection(spec, "a.q_proj", 576, device=device).cpu() != make_projection(spec, "a.q_proj", 576)).sum()
        check(f"{kind} entries that differ from the CPU's", float(differ), 0)
    W_DK = 0.02 * torch.randn(3000, 1000, generator=torch.Generator().manual_seed(0))
    here, there = (stochastic_round(W_DK.to(where), Rounding(0, 1), "a.q_proj").cpu() for where in ("cpu", device))
    check("stochastically rounded entries that differ from the CPU's", float((here != there).sum()), 0)
    targets = select_targets(model, SketchConfig().targets)
    for layer in targets.values():
        layer.weight.requires_grad_(True)
    loss_of(model, ids).backward()
    dense = {n: layer.weight.grad for n, layer in targets.items()}
    for layer in targets.values():
        layer.weight.grad = None
    logra = LoGRA(model, SketchConfig(rank=rank), OptimConfig(update_ratio=1e-3))
    loss_of(model, ids).backward()
    errors = []
    for name, target in logra.targets.items():
        expected = dense[name].double() @ target.projection().double().T
        errors.append(float((target.sketch.grad.double() - expected).norm() / expected.norm()))
    check(f"worst ‖S − G Aᵀ‖ / ‖G Aᵀ‖ of {len(errors)} targets", max(errors), 1e-4 if device.type == "cuda" else 1e-5)
    update = logra.propose()
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, ids.shape[1] // 2 :] = True
    probe = ProbeBatch(ids[:2], torch.ones_like(ids[:2]), mask[:2])
    q = q_jvp(model, update, probe)
    alpha = math.sqrt(2e-5 / q)
    check("predicted over exact KL at 2e-5, off by", abs(alpha**2 * q / exact_kl(model, update, probe, alpha) - 1), 0.03)
    pointers = [t.weight.data_ptr() for t in logra.targets.values()]
    logra.apply(update, alpha)
    check("weights moved to another storage by an update", sum(a != t.weight.data_ptr() for a, t in zip(pointers, logra.targets.values())), 0)
    return logra


def step_costs(model, ids: torch.Tensor, rank: int, device: torch.device) -> None:
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, o: o.requires_grad_(True))
    print(f"{'one step':<10}{'median s':>10}{'peak GiB above weights':>25}")
    for method in ("frozen", "logra", "dense"):
        model.requires_grad_(False)
        optimizer = None
        if method == "logra":
            optimizer = LoGRA(model, SketchConfig(rank=rank), OptimConfig(update_ratio=1e-6))
        elif method == "dense":
            weights = [m.weight.requires_grad_(True) for m in select_targets(model, SketchConfig().targets).values()]
            optimizer = torch.optim.AdamW(weights, lr=1e-8, weight_decay=0.0, fused=device.type == "cuda")
        times, before = [], 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, ids)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else float("nan")
        print(f"{method:<10}{statistics.median(times[1:]):>10.3f}{peak:>25.2f}")
        if method == "logra":
            optimizer.detach()
    hook.remove()


def served(logra: LoGRA, ids: torch.Tensor, path: str | None) -> None:
    from logra_core.engines.vllm_local import VLLMRollout

    engine = VLLMRollout(path, max_model_len=1024, gpu_memory_utilization=0.4)
    engine.resync(full_state_bytes(logra.weights, logra.run_id, logra.version))
    for _ in range(3):
        loss_of(logra.model, ids).backward()
        engine.sync(logra.apply(logra.propose(), 0.1).to_bytes(logra.weights.fingerprint()))
    check("vLLM serves something else than bf16 of the masters", float(engine.served_fingerprint() != logra.weights.fingerprint(torch.bfloat16)), 0)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="")
    parser.add_argument("--vllm", action="store_true")
    for name, default in (("rank", 256), ("rows", 4), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: run this on a GPU node, or with --device cpu --tokens 64 to try the script itself")
    torch.backends.cuda.matmul.allow_tf32 = False
    model, _ = load_policy(args.model or None)
    model = model.to(device)
    ids = torch.randint(3, model.config.vocab_size, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", torch.__version__)
    logra = exactness(model, ids[:, : min(args.tokens, 256)], args.rank, device)
    if args.vllm:
        served(logra, ids[:, :64], args.model or None)
    logra.detach()
    step_costs(model, ids, args.rank, device)
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
