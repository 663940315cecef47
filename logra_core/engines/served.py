"""The target layers of a model that vLLM serves: where they are in it, and what a worker keeps beside them so that they follow exactly.

What is served is round(master), bit for bit. A worker keeps the fp32 masters of the target layers itself, because rounded to nearest a
16-bit weight would swallow most small updates: 4 bytes a target parameter beside the 2 bytes served, and while an update commits another
4 (the copy to roll back to). Of a trainer without masters (`OptimConfig.stochastic_rounding`) it serves the very bits and keeps nothing
beside; while an update commits, 4 bytes of main memory. Where vLLM packs weights (CPU) they go in through its layerwise reload.
Imported by backend.py, after its version guard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ..sync import SyncError
from ..weights import Masters, Modules, Weights, canonical, weight_fingerprint


@dataclass(frozen=True)
class Place:
    """Where a layer of the trainer is in the served model: `rows` of the weight of `module` (at `path`), which holds `parts`."""

    module: torch.nn.Module
    path: str
    rows: slice
    shape: tuple[int, int]
    parts: tuple[str, ...]


def locate(model: torch.nn.Module, names: list[str]) -> dict[str, Place]:
    """The place of every trainer layer; fused ones (qkv, gate and up) by the model's own `packed_modules_mapping`.

    Raises:
        SyncError: naming each layer that is not there or is not a plain linear layer (quantised, wrapped, tied).
    """
    modules, packed = dict(model.named_modules()), getattr(model, "packed_modules_mapping", {}) or {}
    places, problems = {}, []
    for name in names:
        prefix, _, last = name.rpartition(".")
        fused, parts = next(((f, p) for f, p in packed.items() if last in p), (last, [last]))
        path = f"{prefix}.{fused}"
        module = modules.get(path)
        if not isinstance(module, LinearBase) or type(module.quant_method) is not UnquantizedLinearMethod:
            method = type(getattr(module, "quant_method", None)).__name__
            problems.append(f"{name} ({'not there' if module is None else f'{path} is {type(module).__name__} with {method}'})")
            continue
        sizes = list(getattr(module, "output_sizes", [module.output_size]))
        if len(sizes) != len(parts):
            problems.append(f"{name} ({path} has {len(sizes)} parts, expected {', '.join(parts)})")
            continue
        at = parts.index(last)
        rows = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
        places[name] = Place(module, path, rows, (sizes[at], module.input_size), tuple(f"{prefix}.{p}" for p in parts))
    if problems:
        raise SyncError(f"this vLLM cannot take {len(problems)} of {len(names)} layers: {'; '.join(problems[:5])}")
    return places


class Served(Modules):
    """Layout: the target layers `names` of the model that serves them. What is stored waits until `publish`, which serves and reads it back.

    `local` is what waits, else what is served. fp32 masters wait as they are and are served rounded; of bf16 weights without masters,
    what waits and what was served before lie in main memory: 4 bytes a parameter there while an update commits, none between updates, and
    on a GPU one layer at a time.
    """

    copies = True  # an fp32 model would otherwise share its weights with the masters

    def __init__(self, model: torch.nn.Module, model_config: Any, names: list[str]) -> None:
        super().__init__({})
        self.model, self.model_config, self.dtype = model, model_config, model_config.dtype
        self.places = locate(model, names)
        # A fused layer is loaded whole, so the parts of it that do not train are kept as they are (2 bytes a parameter).
        others = locate(model, sorted({p for place in self.places.values() for p in place.parts if p not in self.places}))
        self.fixed = {n: self.served_whole(place.module)[place.rows].clone() for n, place in others.items()}
        self._new: dict[str, torch.Tensor] = {}  # waits to be served
        self._begun: set[str] = set()  # layers whose loading has begun and not been seen to end well, or to be undone
        self._read: tuple[str, torch.Tensor] | None = None  # path and weight of the module that was read last

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {n: place.shape for n, place in self.places.items()}

    @property
    def consistent(self) -> bool:
        """False after a failure that could not be undone, until all of the layers it left open are loaded again."""
        return not self._begun

    @property
    def waiting(self) -> bool:
        """Whether anything is stored that is not served."""
        return bool(self._new)

    def local(self, name: str) -> torch.Tensor:
        if name in self._new:
            return self._new[name]
        place = self.places[name]
        if not self._read or self._read[0] != place.path:
            self._read = None
            self._read = place.path, self.served_whole(place.module)
        return self._read[1][place.rows]

    def forget(self) -> None:
        """Read again what is served when it is asked for next."""
        self._read = None

    def store_(self, name: str, value: torch.Tensor) -> None:
        # a master stays where it is; anything else is a weight of its own, and would take memory of the GPU
        self._new[name] = value.detach() if value.dtype == torch.float32 else value.detach().to("cpu", copy=True)

    def keep(self, name: str) -> torch.Tensor | None:
        """What is served, in main memory; None of a layer that a failure left open."""
        return None if name in self._begun else self.local(name).to("cpu", copy=True)

    def restore_(self, name: str, kept: torch.Tensor | None) -> None:
        """Forget what waits; what was replaced already waits to be served again."""
        self.forget()
        self._new.pop(name, None)
        if name in self._begun and kept is not None:
            self._new[name] = kept

    @torch.no_grad()
    def publish(self) -> None:
        """Serve what waits and read it back.

        Raises:
            SyncError: what is served is not what was loaded. `consistent` stays false until a later publication succeeds.
        """
        self.forget()
        groups = [names for names in self._by_module() if self._new.keys() & set(names)]
        for names in groups:
            self._begun.update(names)
            self._load(self.places[names[0]])
            self._check_served(self.served(names))
        self._begun.difference_update(*groups)
        self._new.clear()
        self.forget()

    @torch.no_grad()
    def served_whole(self, module: torch.nn.Module) -> torch.Tensor:
        """The weight [D, K] that `module` multiplies by: as stored, or where only a packed form is left, its product with one-hot inputs."""
        if module.weight.numel():
            return module.weight.detach()
        eye_KK = torch.eye(module.input_size, dtype=self.dtype, device=module.weight.device)
        return module.quant_method.apply(module, eye_KK, None).T.contiguous()

    def served(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """name -> what is served [D, K], in the model's dtype; of all layers, or of `names`."""
        found = {}
        for group in self._by_module(names):
            whole = self.served_whole(self.places[group[0]].module)
            found |= {n: whole[self.places[n].rows] for n in group}
        return found

    def served_fingerprint(self) -> str:
        """Digest of the served weights; the trainer's is `Weights.fingerprint(dtype)`."""
        return weight_fingerprint((n, canonical(W_DK)) for n, W_DK in sorted(self.served().items()))

    def _to_serve(self, name: str) -> torch.Tensor:
        """[D, K] in the model's dtype."""
        return self.local(name).to(self.places[name].module.weight.device, self.dtype)

    def _by_module(self, names: Iterable[str] | None = None) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in self.places if names is None else names:
            groups.setdefault(self.places[name].path, []).append(name)
        return list(groups.values())

    def _check_served(self, served: dict[str, torch.Tensor]) -> None:
        if wrong := [n for n, W_DK in served.items() if n in self._new and not torch.equal(canonical(W_DK), canonical(self._to_serve(n)))]:
            raise SyncError(f"served weights of {', '.join(wrong[:5])} are not those loaded, in {self.dtype}")

    def _load(self, place: Place) -> None:
        weights = [(p, self._to_serve(p) if p in self.places else self.fixed[p]) for p in place.parts]
        initialize_layerwise_reload(place.module)
        try:
            self.model.load_weights([(f"{n}.weight", w) for n, w in weights])
        finally:
            finalize_layerwise_reload(place.module, self.model_config)


class ServedWeights(Weights):
    """The weights of a serving model: fp32 masters of the worker's own, served rounded and starting as what is served now; or the very
    bf16 bits, as `rounding` says."""

    layout: Served

    def __init__(self, model: torch.nn.Module, model_config: Any, names: list[str], rounding: Masters | None = None) -> None:
        rounding = rounding or Masters()
        if rounding.kind != Masters.kind and model_config.dtype != torch.bfloat16:
            raise SyncError(f"the trainer keeps bf16 weights without masters; this engine serves {model_config.dtype}: start it in bfloat16")
        super().__init__(Served(model, model_config, names), rounding)
        self.layout.forget()

    @property
    def consistent(self) -> bool:
        return self.layout.consistent

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """Digest of the masters; without any, of what waits to be served, else of what is."""
        return super().fingerprint(dtype) if self.kind == Masters.kind or self.layout.waiting else self.layout.served_fingerprint()

    def served_fingerprint(self) -> str:
        return self.layout.served_fingerprint()
