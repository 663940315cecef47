"""The processes of one run, seen from one of them: values and rows of tensors that go between ranks, and what happens when one fails.

Row shards are DTensor's: rank i holds rows [i c, (i + 1) c) of D with c = ceil(D / world), the last ranks fewer or none.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ..settings import ConfigError

T = TypeVar("T")
LAUNCH = {"MASTER_ADDR", "MASTER_PORT"} | {scope + kind for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for kind in ("RANK", "WORLD_SIZE")}


class PeerError(RuntimeError):
    """Another process of the run failed, died or does not answer; this one cannot go on."""


def rows_of(length: int, world: int, rank: int) -> slice:
    """Rows of a tensor of `length` rows that a rank holds, as DTensor's Shard(0) cuts it; empty for the last ranks of a short one."""
    chunk = -(-length // world)
    return slice(min(rank * chunk, length), min((rank + 1) * chunk, length))


def spare_devices(visible: str | None, count: int, ranks: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the node's GPUs that no rank trains on (those after the first `ranks`); None when there are none.

    visible: its value now (None: all). count: GPUs that torch sees.
    """
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return ",".join(names[ranks:count]) or None


@contextlib.contextmanager
def outside_launch(devices: str | None = None) -> Iterator[None]:
    """Environment for a library that starts processes of its own here: without torchrun's variables, which would make them look for the
    ranks of this launch, and with `devices` visible (None: those that are visible now)."""
    changed = [k for k in os.environ if k in LAUNCH or k.startswith("TORCHELASTIC_")] + (["CUDA_VISIBLE_DEVICES"] if devices else [])
    before = {k: os.environ.pop(k, None) for k in changed}
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ |= {k: v for k, v in before.items() if v is not None}


class Ranks:
    """The processes of a torchrun launch, seen from one of them. Every method is collective: all ranks call it, in the same order.

    timeout: seconds after which a rank that does not answer is taken for dead.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        if missing := [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]:
            raise ConfigError(f"not a distributed launch: {', '.join(missing)} not set; start with torchrun")
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=timeout))
        self.rank, self.world, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.mesh = init_device_mesh(self.device.type, (self.world,))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def sum(self, value: float) -> float:
        """Σ over ranks in float64 and in rank order: the same bits on every rank."""
        return sum(self.gather(float(value)))

    def on_first(self, make: Callable[[], T], share: bool = False) -> T | None:
        """Run `make` on rank 0 while the others wait; they get its value with `share`, else None.

        Raises:
            what `make` raised, on rank 0. PeerError: naming it, on the others.
        """
        value, error = None, None
        if self.first:
            try:
                value = make()
            except Exception as raised:
                error = raised
        told: list[Any] = [(error and f"{type(error).__name__}: {error}", value if share else None)]
        dist.broadcast_object_list(told, src=0)
        if error is not None:
            raise error
        if told[0][0] is not None:
            raise PeerError(f"rank 0 failed: {told[0][0]}")
        return value if self.first else told[0][1]

    def from_first(self, make: Callable[[], T]) -> T:
        """The value of `make` on rank 0, on every rank."""
        return self.on_first(make, share=True)

    # ---- rows of tensors

    def rows(self, length: int) -> slice:
        """This rank's rows."""
        return rows_of(length, self.world, self.rank)

    def own_rows(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor or a DTensor sharded by rows."""
        return value.to_local() if isinstance(value, DTensor) else value[self.rows(len(value))]

    def gather_rows(self, own: torch.Tensor, length: int) -> torch.Tensor:
        """Whole tensor [length, ...] out of every rank's rows."""
        chunk = -(-length // self.world)
        padded = own.contiguous()
        if len(own) < chunk:
            padded = own.new_zeros(chunk, *own.shape[1:])
            padded[: len(own)] = own
        whole = own.new_empty(chunk * self.world, *own.shape[1:])
        dist.all_gather_single(whole, padded)
        return whole[:length]

    def sum_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of every rank's whole tensor [D, ...]."""
        length, chunk = len(whole), -(-len(whole) // self.world)
        padded = whole.contiguous()
        if length < chunk * self.world:
            padded = whole.new_zeros(chunk * self.world, *whole.shape[1:])
            padded[:length] = whole
        own = whole.new_empty(chunk, *whole.shape[1:])
        dist.reduce_scatter_single(own, padded)
        rows = self.rows(length)
        return own[: rows.stop - rows.start]

    def as_dtensor(self, own: torch.Tensor, length: int) -> DTensor:
        """This rank's rows as a DTensor of `length` rows; the storage is shared."""
        whole = torch.empty(length, *own.shape[1:], device="meta")
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    def empty(self, size: torch.Size, dtype: torch.dtype) -> DTensor:
        """A DTensor sharded by rows, to load into."""
        rows = self.rows(size[0])
        return self.as_dtensor(torch.empty(rows.stop - rows.start, *size[1:], dtype=dtype, device=self.device), size[0])
