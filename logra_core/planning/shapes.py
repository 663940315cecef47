"""Shapes of the models that the paper and the notebooks speak of, without their weights: a config, a skeleton, its linear layers.

Belongs here: published sizes as transformers configs, and tables of what trains. Skeletons live on the meta device (no memory),
and the layers are found by `select_targets`, so a table made from shapes speaks of what training would touch.
"""

from __future__ import annotations

import torch
from torch import nn

from ..settings import QWEN_LLAMA_TARGETS, ConfigError
from ..sketch import Target, select_targets

# Sizes from the models' public configs. "27B (assumed)": the config of the paper's Qwen3.8-27B is not known to us; these are the
# published sizes of the Qwen3.5 / Qwen3.6 27B text decoder (48 of its 64 layers use linear attention, whose projections have other
# names: q, k, v and o are targets in the other 16 layers, gate, up and down in all).
_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 131072}
SHAPES: dict[str, dict] = {
    "SmolLM2-135M": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "Qwen2.5-Math-1.5B": _QWEN2 | {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": _QWEN2 | {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "27B (assumed)": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 262144,
    },
}  # fmt: skip


def model_config(name: str, layers: int | None = None, attention: str | None = None):
    """transformers config of a model in `SHAPES`, with another number of layers, all of one kind of attention, if told.

    attention: "full_attention" or "linear_attention"; for models that alternate. ConfigError for an unknown name.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ConfigError(f"model shape {name!r}: allowed is one of {', '.join(SHAPES)}")
    settings = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    if attention is not None:
        settings["layer_types"] = [attention] * settings["num_hidden_layers"]
    return AutoConfig.for_model(**settings)


def build(config, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Causal LM of a config, on the device (or in the fake-tensor mode) in force; causal attention without a mask tensor.

    transformers draws a mask whenever it cannot look at the data, as under fake tensors, and keeps it for backward; an attention
    of another name than its own gets none, and then calls the same fused kernel with `is_causal`.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="causal_sdpa")


def skeleton(name: str) -> nn.Module:
    """The model of `SHAPES[name]` on the meta device: all names and shapes, no memory."""
    with torch.device("meta"):
        return build(model_config(name))


def parameters(name: str) -> int:
    """All parameters of the model; a tied head counts once."""
    return sum(p.numel() for p in skeleton(name).parameters())


def linear_shapes(name: str, targets: tuple[str, ...] = QWEN_LLAMA_TARGETS) -> dict[str, tuple[int, int]]:
    """Canonical layer name -> (D, K) of every target, in model order."""
    return {n: tuple(layer.weight.shape) for n, layer in select_targets(skeleton(name), targets).items()}


def sketch_payload(shapes: dict[str, tuple[int, int]], rank: int, element: int = 2) -> int:
    """Bytes of the factors of one update: Σ D·r·element (METHOD section 5); bf16 unless told."""
    return sum(d * rank * element for d, _ in shapes.values())


def full_payload(shapes: dict[str, tuple[int, int]], element: int = 2) -> int:
    """Bytes of the same layers sent whole: Σ D·K·element; bf16 unless told."""
    return sum(d * k * element for d, k in shapes.values())


def target_table(targets: dict[str, Target]) -> str:
    """What was chosen, a line a kind of layer: name, how many, D x K, weight and sketch parameters."""
    kinds: dict[tuple, list[Target]] = {}
    for target in targets.values():
        key = (target.name.rpartition(".")[2], target.module.out_features, target.width)
        kinds.setdefault(key, []).append(target)
    rows = [f"{'layer':<12}{'count':>6}{'D x K':>16}{'weights':>15}{'sketch':>13}"]
    for (kind, d, k), members in kinds.items():
        count = len(members)
        rows.append(f"{kind:<12}{count:>6}{f'{d} x {k}':>16}{count * d * k:>15,}{sum(t.sketch.numel() for t in members):>13,}")
    weights = sum(t.module.out_features * t.width for t in targets.values())
    sketch = sum(t.sketch.numel() for t in targets.values())
    rows.append(f"{'all':<12}{len(targets):>6}{'':>16}{weights:>15,}{sketch:>13,}")
    return "\n".join(rows)
