"""Run logs (header, crash safety, resume) and figures (same bytes, size, look in grey)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import torch

from logra_core.lab import figures
from logra_core.lab.figures import save_figure, theme
from logra_core.rl import runlog
from logra_core.rl.runlog import RunLog, read_log, scrub


@dataclass(frozen=True)
class Config:
    rank: int = 64
    out: str = "x"


def header(**extra) -> dict:
    return {"seed": 3, "config": {"rank": 64}} | extra


def test_header_says_how_the_run_came_about(tmp_path: Path) -> None:
    RunLog(tmp_path / "log.jsonl", header()).close()
    got, rows = read_log(tmp_path / "log.jsonl")
    assert rows == [] and got["kind"] == "header" and got["seed"] == 3 and got["config"] == {"rank": 64}
    assert got["versions"]["torch"] == torch.__version__ and got["versions"]["numpy"] == np.__version__
    assert {"python", "transformers", "logra-core"} <= set(got["versions"])
    machine = got["machine"]
    assert machine["torch_threads"] == torch.get_num_threads() and 1 <= machine["cores"] <= os.cpu_count()
    assert machine["memory_gib"] > 0.1 and isinstance(machine["gpus"], list) and len(machine["cpu"]) > 2
    started = datetime.strptime(got["started"], "%Y-%m-%dT%H:%M:%S%z")
    assert 0 <= (datetime.now(timezone.utc) - started).total_seconds() < 60
    assert "pytest" in got["command"]


def test_commit_and_dirty_follow_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repo"
    (root / "logra_core/rl").mkdir(parents=True)
    (root / "logra_core/rl/runlog.py").write_text("a")
    monkeypatch.setattr(runlog, "ROOT", root)
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    assert runlog._commit() == (None, None)  # no repository
    subprocess.run([*git, "init", "-q"], check=True)
    assert runlog._commit() == (None, None)  # somebody else's: the package is not tracked there
    subprocess.run([*git, "add", "."], check=True)
    assert runlog._commit() == (None, None)  # no commit yet
    subprocess.run([*git, "commit", "-q", "-m", "c"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert runlog._commit() == (head, False)
    (root / "out.txt").write_text("a run's output is no change of the source")
    assert runlog._commit() == (head, False)
    (root / "logra_core/new.py").write_text("")
    assert runlog._commit() == (head, True)


def test_no_machine_detail_gets_into_a_log(tmp_path: Path) -> None:
    home, inside = Path.home(), runlog.ROOT / "data/runs/a"
    config = {
        "out": str(tmp_path / "deep/run7"),
        "model": f"{home}/models/m",
        "in": str(inside),
        "tilde": "~/x/y",
        "n": [str(tmp_path / "q")],
        "p": tmp_path / "z",
    }
    with RunLog(tmp_path / "log.jsonl", header(config=config, note=f"from {tmp_path}/deep/f.yaml with out={home}/o")) as log:
        log.row("eval", file=tmp_path / "deep/z.json", own=inside, text="3 / 5 and 1/2")
    text = (tmp_path / "log.jsonl").read_text()
    for secret in (str(tmp_path), str(home), str(runlog.ROOT), os.uname().nodename):
        assert secret not in text
    got, (row,) = read_log(tmp_path / "log.jsonl")
    assert got["config"] == {"out": "run7", "model": "m", "in": "data/runs/a", "tilde": "y", "n": ["q"], "p": "z"}
    assert got["note"] == "from f.yaml with out=o"
    assert row == {"kind": "eval", "file": "z.json", "own": "data/runs/a", "text": "3 / 5 and 1/2"}


@pytest.mark.parametrize(
    "text", ["tokens/s", "1/2 and 3/4", "HuggingFaceTB/SmolLM2-135M", "a b", "https://example.org/a/b", "data/runs/x", "5 / 3", "../data"]
)
def test_scrub_leaves_what_is_no_absolute_path(text: str) -> None:
    assert scrub(text) == text


def test_rows_hold_numbers_arrays_and_dataclasses_and_refuse_the_rest(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.jsonl", header()) as log:
        log.row(
            "update",
            a=np.float32(0.5),
            b=torch.tensor([1.0, float("nan")]),
            c=torch.tensor(2),
            d=Config(),
            e=float("inf"),
            f="ü",
            g=True,
            h=None,
            i=(1, 2),
            j=np.int64(7),
        )
        with pytest.raises(TypeError, match="cannot hold object"):
            log.row("update", x=object())
        with pytest.raises(ValueError, match="one header"):
            log.row("header", x=1)
    _, rows = read_log(tmp_path / "log.jsonl")
    expected = {
        "kind": "update",
        "a": 0.5,
        "b": [1.0, None],
        "c": 2,
        "d": {"rank": 64, "out": "x"},
        "e": None,
        "f": "ü",
        "g": True,
        "h": None,
        "i": [1, 2],
        "j": 7,
    }
    assert rows == [expected]
    with pytest.raises(ValueError, match="closed"):
        log.row("update")


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1000).tolist() + [1e-300, 5e-324, 0.1 + 0.2]
    with RunLog(tmp_path / "log.jsonl", header()) as log:
        log.row("update", values=values)
    assert read_log(tmp_path / "log.jsonl")[1][0]["values"] == values


def test_a_new_log_never_overwrites_and_needs_a_seed(tmp_path: Path) -> None:
    RunLog(tmp_path / "log.jsonl", header()).close()
    before = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="resume"):
        RunLog(tmp_path / "log.jsonl", header())
    assert (tmp_path / "log.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="seed"):
        RunLog(tmp_path / "other.jsonl", {"config": {}})
    assert not (tmp_path / "other.jsonl").exists()


def test_a_torn_last_line_is_left_out_at_every_cut_and_repaired_by_resume(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path, header()) as log:
        for update in range(3):
            log.row("update", update=update, text="é")
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = cut >= len(whole) - 1  # only the line feed is missing: the row is whole
        kept = [0, 1, 2] if complete else [0, 1]
        assert [r["update"] for r in read_log(path)[1]] == kept
        with RunLog.resume(path) as log:
            log.row("update", update=9)
        assert [r["update"] for r in read_log(path)[1]] == [*kept, 9]


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path, header()) as log:
        log.row("update", update=0)
        log.row("update", update=1)
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged, needle in (
        ([lines[0], b'{"kin\n', lines[2]], "line 2"),
        ([lines[1], lines[2]], "not a header"),
        ([b"[1]\n", lines[1]], "line 1"),
        ([], "not a header"),
        ([b'{"kind":'], "line 1"),
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(ValueError, match=needle):
            read_log(path)
        with pytest.raises(ValueError, match=needle):
            RunLog.resume(path)
        assert path.read_bytes() == b"".join(damaged)


def test_resume_drops_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path, header()) as log:
        for update in range(10):
            log.row("update", update=update, loss=update / 3)
    first = path.read_bytes()
    with RunLog.resume(path, keep=lambda row: row["update"] <= 5) as log:
        for update in range(6, 10):
            log.row("update", update=update, loss=update / 3)
    assert path.read_bytes() == first  # an interrupted run's log ends as the uninterrupted one's
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_rows_survive_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys; from logra_core.rl.runlog import RunLog\n"
        "log = RunLog(sys.argv[1], {'seed': 0})\n"
        "for i in range(10**9): log.row('update', update=i, pad='x' * 3000); print(i, flush=True)"
    )
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(5 + 20 * number):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        told = int(rest[-1]) if rest else last
        updates = [r["update"] for r in read_log(path)[1]]
        assert updates == list(range(len(updates))) and updates[-1] >= told - 1 and updates[-1] >= last


# ------------------------------------------------------------------ figures


@pytest.fixture
def figure():
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.use("Agg", force=True)
        from matplotlib import pyplot as plt

        theme()
        fig, axis = plt.subplots()
        for i in range(4):
            axis.plot(np.linspace(0, 1, 9), np.linspace(0, i, 9), label=f"line {i}")
        axis.set(title="A title", xlabel="update", ylabel="reward")
        axis.legend()
        yield fig
        plt.close(fig)


def test_figures_are_the_same_bytes_small_and_free_of_metadata(figure, tmp_path: Path) -> None:
    from PIL import Image

    first = save_figure(figure, "curve", tmp_path / "a")
    second = save_figure(figure, "curve", tmp_path / "b")
    assert first == tmp_path / "a/curve.png" and first.read_bytes() == second.read_bytes()
    assert b"Matplotlib" not in first.read_bytes() and first.stat().st_size < 200_000
    image = Image.open(first)
    assert image.size[0] > 1000 and round(image.info["dpi"][0]) == 150
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["curve.png"]


def test_a_heavy_figure_is_reduced_and_a_hopeless_one_refused(figure, tmp_path: Path) -> None:
    from PIL import Image

    axis = figure.axes[0]
    axis.imshow(
        np.kron(np.random.default_rng(0).random((60, 60)), np.ones((4, 4))),
        extent=(0, 1, 0, 1),
        cmap="viridis",
        interpolation="bicubic",
        aspect="auto",
    )
    full = save_figure(figure, "heavy", tmp_path)
    assert full.stat().st_size < 200_000 and Image.open(full).mode == "P"  # 256 colours: the plain one was too big
    axis.imshow(np.random.default_rng(0).random((900, 1400, 3)), extent=(0, 1, 0, 1), aspect="auto", interpolation="nearest")
    with pytest.raises(ValueError, match="'noise' has .* draw fewer"):
        save_figure(figure, "noise", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["heavy.png"]


def test_the_figures_folder_is_the_repositorys_unless_told(figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGRA_FIGURES", raising=False)
    monkeypatch.chdir(tmp_path)
    assert figures.figures_folder() == runlog.ROOT / "figures"
    monkeypatch.setenv("LOGRA_FIGURES", str(tmp_path / "f"))
    assert save_figure(figure, "x") == tmp_path / "f/x.png"
    for name in ("a/b", "A", "x.png", "", "../x"):
        with pytest.raises(ValueError, match="figure name"):
            save_figure(figure, name)


def test_lines_differ_without_colour(figure) -> None:
    lines = figure.axes[0].get_lines()
    looks = {(str(line.get_linestyle()), line._dash_pattern[1] and tuple(line._dash_pattern[1]), line.get_marker()) for line in lines}
    assert len({marker for *_, marker in looks}) == len(lines) == len(looks)
    assert len({(style, dash) for style, dash, _ in looks}) == len(lines)
    sizes = [figure.axes[0].title.get_size(), figure.axes[0].xaxis.label.get_size(), figure.axes[0].get_legend().get_texts()[0].get_size()]
    assert min(sizes) >= 14  # points: half size leaves 7


def test_importing_it_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('runlog', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['runlog'] = module; spec.loader.exec_module(module)\n"
        "assert not {'torch', 'matplotlib', 'seaborn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, runlog.__file__], check=True)
