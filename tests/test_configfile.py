"""Settings from YAML text: what is unreadable or ambiguous in it is a ConfigError that says where, never a silent choice."""

import pytest

from logra_core.rl.configfile import load_config
from logra_core.settings import ConfigError

BAD = [
    ("sketch: {rank: 8}\nseed: 1\nsketch: {distribution: gaussian}\n", "given twice: sketch"),
    ("sketch:\n  rank: 8\n  rank: 16\n", "given twice: rank"),
    ("sketch: {rank: 8\n", "not readable as YAML"),
    ("1: 2\n", "no field 1"),
    ("on: 3\n", "no field True"),
    ("- a\n", "holds a list"),
]


@pytest.mark.parametrize("text, words", BAD)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(path)


@pytest.mark.parametrize("argument, words", [
    ("optim.update_ratio=[1", "not readable as YAML"), ("sketch.ranks={a: 1, a: 2}", "given twice: a"), ("sketch.rank", "dotted.key=value"),
])  # fmt: skip
def test_bad_arguments_name_the_argument(tmp_path, argument, words):
    path = tmp_path / "recipe.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=words) as error:
        load_config(path, [argument])
    assert argument in str(error.value)


def test_the_file_and_what_comes_on_top(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("optim: {update_ratio: 1e-5}\nsketch: {rank: 8}\n")
    config = load_config(path, ["sketch.distribution=gaussian", "optim.beta2=0.9"])
    assert (config.optim.update_ratio, config.optim.beta2, config.sketch.rank, config.sketch.distribution) == (1e-5, 0.9, 8, "gaussian")
