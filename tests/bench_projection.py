"""What it costs to draw, digest and receive a Rademacher A: as bits, as the package does, and as fp32 matrices, in one run.

    python tests/bench_projection.py [--layers 12] [--rank 256] [--width 4096] [--rows 4096] [--repeats 5]

"matrix" is what every side did before bits were kept: each A made whole from the random words by `numpy.unpackbits`, digested in fp32, and
again at the receiver. Ratios are medians of the repeats; both ways run in turn.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import numpy as np
import torch
import xxhash

from logra_core import Projection, ProjectionSpec, SketchUpdate
from logra_core.projection import projection_digest, sign_bytes, stream_of


def whole(spec: ProjectionSpec, name: str, width: int) -> torch.Tensor:
    """A [r, k] fp32 made at once from the stream."""
    packed = sign_bytes(stream_of(spec, name), spec.rank, width)
    bits = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little"))[:, :width]
    scale = 1 / math.sqrt(spec.rank)
    return bits.to(torch.float32).mul_(2 * scale).sub_(scale).contiguous()


def digest_of(matrices: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(matrices):
        digest.update(name.encode())
        digest.update(matrices[name].numpy())
    return digest.hexdigest()


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("rank", 256), ("width", 4096), ("rows", 4096), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    spec, names = ProjectionSpec(0, 0, args.rank, "rademacher"), [f"model.layers.{i}.mlp.down_proj" for i in range(args.layers)]

    def projections() -> dict[str, Projection]:
        return {n: Projection(spec, n, args.width) for n in names}

    factors = {n: torch.randn(args.rows, args.rank).to(torch.bfloat16) for n in names}
    message = SketchUpdate("run", 1, factors, projections(), rounded=True).to_bytes("")
    factor_bytes = sum(U.nbytes for U in factors.values())
    kept, matrices = projections(), {n: whole(spec, n, args.width) for n in names}
    assert all(torch.equal(kept[n].matrix(), A) for n, A in matrices.items())

    def received_as_matrices() -> None:
        SketchUpdate.from_bytes(message)  # parses, digests the factors, draws bits; beside it what was done instead of bits
        digest_of({n: whole(spec, n, args.width) for n in names})

    cases = {
        "draw": (lambda: [p.bits for p in projections().values()], lambda: [whole(spec, n, args.width) for n in names]),
        "digest": (lambda: projection_digest({n: _fresh(p) for n, p in kept.items()}), lambda: digest_of(matrices)),
        "draw and digest": (lambda: projection_digest(projections()), lambda: digest_of({n: whole(spec, n, args.width) for n in names})),
        "from_bytes": (lambda: SketchUpdate.from_bytes(message), received_as_matrices),
        "unpack kept bits": (lambda: [p.matrix() for p in kept.values()], lambda: [whole(spec, n, args.width) for n in names]),
    }  # fmt: skip
    print(f"{args.layers} layers, A {args.rank} x {args.width}, factors {factor_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads, CPU")
    print(f"{'':<20}{'bits, ms':>12}{'matrix, ms':>12}{'ratio':>8}")
    for name, (bits, matrix) in cases.items():
        bits(), matrix()
        pairs = [(timed(bits), timed(matrix)) for _ in range(args.repeats)]
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name:<20}{statistics.median(a for a, _ in pairs):>12.2f}{statistics.median(b for _, b in pairs):>12.2f}{ratio:>8.1f}")


def _fresh(projection: Projection) -> Projection:
    """The same bits without the digest that is kept."""
    made = Projection(projection.spec, projection.name, projection.width)
    made.__dict__["bits"] = projection.bits
    return made


if __name__ == "__main__":
    main()
