"""Can a run work on this machine: devices, versions, data, disk and memory, looked at before anything starts.

Belongs here: the checks, each with what was found and what is needed. Memory of a training GPU is planner.py's answer; what a vLLM server and
the loading of a checkpoint take is counted here, from the model's shape. Nothing is fetched, and no GPU memory is touched.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from ..rl.runlog import ROOT
from ..rl.settings import TrainConfig
from ..settings import ConfigError
from ..variants.allocation import layer_ranks
from .launch import LaunchConfig
from .layout import program_layout
from .planner import Plan, plan
from .shapes import SHAPES, linear_shapes, parameters

GIB = 2**30
HEADROOM = 4 * GIB  # of a server's GPU: activations of a batch, CUDA itself
PACKAGES = ("torch", "transformers", "vllm")


@dataclass(frozen=True)
class Check:
    """One question: what, whether the answer is good enough, and the answer beside what is needed."""

    what: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.what}: {self.detail}"


def shape_of(model: str) -> str:
    """The entry of `shapes.SHAPES` of a model ("": the embedded policy), by the last part of its name; ConfigError if there is none."""
    name = Path(model).name if model else "SmolLM2-135M"
    if name not in SHAPES:
        raise ConfigError(f"no shape is known for model {model!r}: name one of {', '.join(SHAPES)} that is as large")
    return name


def preflight(launch: LaunchConfig, seed: int = 0, shape: str = "") -> list[Check]:
    """Every check of one seed's run, failed ones too.

    shape: entry of `shapes.SHAPES` to plan with; "" finds it by the model's name.
    Raises:
        ConfigError: a bad setting, or a model whose shape is not known.
    """
    cfg = launch.config(seed)
    shape = shape or shape_of(cfg.model)
    return [devices(launch), versions(launch.servers > 0), model(cfg), data(cfg), disk(cfg, shape), *memory(launch, cfg, shape)]


def devices(launch: LaunchConfig) -> Check:
    """The GPUs named are there; without any, that the processes do not crowd the cores."""
    wanted, there = [*launch.train_devices, *launch.rollout_devices], torch.cuda.device_count()
    if wanted:
        missing = [d for d in wanted if d >= there]
        rest = "" if not missing else f"; missing: {', '.join(map(str, missing))}"
        return Check("devices", not missing, f"{len(launch.train_devices)} GPUs train, {len(launch.rollout_devices)} generate, {there} are there{rest}")
    return Check("devices", True, f"CPU: {launch.ranks} ranks (gloo) and {launch.servers} vLLM server{'s' * (launch.servers != 1)}")


def versions(with_vllm: bool) -> Check:
    """Installed versions beside the pins of this package's own requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text()) if (ROOT / "pyproject.toml").is_file() else {}
    lines = project.get("project", {}).get("dependencies", []) + project.get("project", {}).get("optional-dependencies", {}).get("vllm", [])
    pins = dict(line.split("==") for line in lines if "==" in line)
    found = {name: _version(name) for name in PACKAGES if name != "vllm" or with_vllm}
    bad = [n for n, v in found.items() if v is None or v.split("+")[0] != pins.get(n, v.split("+")[0])]
    detail = ", ".join(f"{n} {v or 'not installed'}" + (f" (needs {pins[n]})" if n in bad and n in pins else "") for n, v in found.items())
    return Check("versions", not bad, detail)


def _version(name: str) -> str | None:
    for known in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(known).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def model(cfg: TrainConfig) -> Check:
    """Weights and tokenizer are at hand, or may be fetched."""
    return _at_hand("model", cfg.model, "model") if cfg.model else Check("model", True, "the embedded policy")


def data(cfg: TrainConfig) -> Check:
    """The problems are at hand, may be fetched, or are made from seeds."""
    if cfg.task.name != "math":
        return Check("data", True, f"generated from seeds: {cfg.task.name.replace('+', ', ')}")
    parts = [_at_hand("data", source, "dataset") for source in (cfg.task.train_data, cfg.task.eval_data)]
    return Check("data", all(p.ok for p in parts), "; ".join(p.detail for p in parts))


def _at_hand(what: str, source: str, kind: str) -> Check:
    if Path(source).expanduser().exists():
        return Check(what, True, f"{Path(source).name} is a local path")
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        return Check(what, False, f"{source} is neither a path that exists nor a hub id (owner/name)")
    from huggingface_hub.constants import HF_HUB_CACHE

    if (Path(HF_HUB_CACHE) / f"{kind}s--{source.replace('/', '--')}").is_dir():
        return Check(what, True, f"{source} is in the hub's cache")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    return Check(what, not offline, f"{source} is not in the hub's cache" + (", and HF_HUB_OFFLINE forbids fetching it" if offline else ": it will be fetched"))


def _trained(cfg: TrainConfig, shape: str) -> int:
    """Weights of the target layers."""
    return sum(d * k for d, k in linear_shapes(shape, cfg.sketch.targets).values())


def _weight_bytes(cfg: TrainConfig) -> int:
    """Of one weight as the policy is loaded, and as checkpoints and full messages hold it."""
    return getattr(torch, cfg.weight_dtype).itemsize


def disk_bytes(cfg: TrainConfig, shape: str) -> int:
    """Of two checkpoints (the old one goes when the new one is whole) and one full message to servers."""
    targets, weights, layers = _trained(cfg, shape), _weight_bytes(cfg) * _trained(cfg, shape), linear_shapes(shape, cfg.sketch.targets)
    ranks = layer_ranks(cfg.sketch.rank, cfg.sketch.ranks, layers) if cfg.optim.beta1 else dict.fromkeys(layers, 0)  # the first moment has a sketch's shape
    state = 8 * targets if cfg.method == "dense" else 4 * sum(d * (1 + ranks[name]) for name, (d, _) in layers.items())
    return 2 * (weights + state) + weights


def disk(cfg: TrainConfig, shape: str) -> Check:
    """Room for `disk_bytes` where the run's folder will be."""
    needed = disk_bytes(cfg, shape)
    folder = Path(cfg.out).absolute()
    while not folder.exists():
        folder = folder.parent
    return Check("disk", shutil.disk_usage(folder).free >= needed, f"{needed / GIB:.1f} GiB needed for checkpoints and a full message")


# ------------------------------------------------------------------ memory


def training_plan(launch: LaunchConfig, cfg: TrainConfig, shape: str, context: int = 0) -> Plan:
    """The planner's account of one rank, laid out as distributed.py does it.

    context: tokens of prompt and response together; 0: the response's limit and a third more, at least 256 more.
    """
    tokens = context or max(cfg.sampling.max_tokens * 4 // 3, cfg.sampling.max_tokens + 256)
    return plan(
        shape, cfg.method, cfg.sketch.rank, launch.ranks, program_layout(cfg), tokens, cfg.ppo.microbatch, getattr(torch, cfg.compute_dtype),
        cfg.gradient_checkpointing, max(1, -(-cfg.kl.probe_responses // launch.ranks)), cfg.kl.estimator,
        cfg.ppo.prompts_per_update > cfg.ppo.microbatch * launch.ranks,
    )  # fmt: skip


def server_bytes(launch: LaunchConfig, cfg: TrainConfig, shape: str) -> int:
    """Of one vLLM server: bf16 weights, fp32 masters of the targets twice (while an update commits), keys and values, headroom.

    Without masters what waits to be served and what to roll back to is 4 bytes a target of main memory: here only where the server is there.
    """
    kept = 8 if not cfg.optim.stochastic_rounding else 0 if launch.rollout_devices else 4
    return 2 * parameters(shape) + kept * _trained(cfg, shape) + int(launch.kv_cache_gib * GIB) + (HEADROOM if launch.rollout_devices else GIB)


def memory(launch: LaunchConfig, cfg: TrainConfig, shape: str) -> list[Check]:
    """What a training rank, a server and the loading of the checkpoint take, beside what there is."""
    import psutil

    made, host = training_plan(launch, cfg, shape), psutil.virtual_memory().available
    served, loaded = server_bytes(launch, cfg, shape), _weight_bytes(cfg) * parameters(shape) * launch.ranks  # every rank reads the whole model
    if not launch.train_devices:
        needed = launch.ranks * made.peak + launch.servers * served
        detail = f"{needed / GIB:.1f} GiB planned for {launch.ranks} ranks ({made.peak / GIB:.1f}) and {launch.servers} server ({served / GIB:.1f})"
        return [Check("memory", max(needed, loaded) <= host, detail)]
    room = min((_capacity(d) for d in launch.train_devices), default=0)
    found = [Check("memory, training", made.fits(room), made.answer(room))]
    if launch.rollout_devices:
        room = min(_capacity(d) for d in launch.rollout_devices)
        kept = "no masters" if cfg.optim.stochastic_rounding else "fp32 masters twice"
        detail = f"{served / GIB:.1f} of {room / GIB:.1f} GiB: bf16 weights, {kept}, {launch.kv_cache_gib:g} GiB of keys and values"
        found.append(Check("memory, server", served <= room, detail))
    when = f"{launch.ranks} ranks load {'bf16' if cfg.optim.stochastic_rounding else 'fp32'} weights"
    if cfg.optim.stochastic_rounding and (waiting := 4 * _trained(cfg, shape) * launch.servers) > loaded:
        loaded, when = waiting, f"an update commits in {launch.servers} servers"
    return [*found, Check("memory, host", loaded <= host, f"{loaded / GIB:.0f} GiB needed while {when}")]


def _capacity(device: int) -> int:
    """Bytes of a GPU; 0 if it is not there."""
    return torch.cuda.get_device_properties(device).total_memory if device < torch.cuda.device_count() else 0
