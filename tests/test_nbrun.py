"""Notebook runner: strict parameters, no process left behind, whole outputs. Notebooks are built here and really run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from logra_core.lab import nbparams, nbrun

KERNELSPEC = {"display_name": "mine", "language": "python", "name": "someones-private-env"}


def write(path: Path, *cells: str, tag: str | None = "parameters", kernelspec: dict | None = None) -> Path:
    """A notebook of code cells, the first one tagged."""
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec or nbrun.KERNELSPEC})
    nb.cells = [nbformat.v4.new_code_cell(c) for c in cells]
    if tag:
        nb.cells[0].metadata["tags"] = [tag]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


def printed(path: Path) -> str:
    nb = nbformat.read(path, as_version=4)
    return "".join(o.text for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream")


def marked() -> list[int]:
    """Live processes started by any run of the runner that this test started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("NBRUN_TEST") == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            pass
    return [pid for pid in found if pid != os.getpid()]


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "logra_core.lab.nbrun", *map(str, args)]


def run(*args: object, **kw) -> subprocess.CompletedProcess:
    env = os.environ | {"NBRUN_TEST": str(os.getpid())}
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, env=env, **kw)


def status(args: list[str]) -> int:
    """Exit status of a command line that is refused (in this process: it installs no signal handler)."""
    try:
        return nbrun.main(args)
    except SystemExit as error:
        return error.code


DEFAULTS = "lr = 1e-3\nsteps = 3\nname = 'a'\nflag = False\nranks = [4, 16]\nscales = [0.5]\nnothing = None\nlimit: int | None = None"


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    return write(tmp_path / "typed.ipynb", DEFAULTS, "print(repr((lr, steps, name, flag, ranks, scales, nothing, limit)))")


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lr", "1e-5", 1e-5),
        ("lr", 2, 2.0),
        ("lr", 0.5, 0.5),
        ("steps", 30, 30),
        ("flag", True, True),
        ("name", "1e-5", "1e-5"),
        ("ranks", [8], [8]),
        ("scales", ["1e-5", 1], [1e-5, 1.0]),
        ("nothing", None, None),
        ("nothing", 3, 3),
        ("limit", 4, 4),
        ("limit", None, None),
    ],
)
def test_yaml_values_take_the_type_of_the_default(typed: Path, name: str, given: object, expected: object) -> None:
    got = nbparams.check_parameters(typed, {name: given})[name]
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lr", "1e-5", 1e-5),
        ("lr", "2", 2.0),
        ("steps", "30", 30),
        ("flag", "true", True),
        ("flag", "False", False),
        ("name", "30", "30"),
        ("name", "None", "None"),
        ("ranks", "[4, 64]", [4, 64]),
        ("scales", "[1e-5]", [1e-5]),
        ("limit", "7", 7),
        ("limit", "None", None),
        ("nothing", "None", None),
    ],
)
def test_words_take_the_type_of_the_default(typed: Path, name: str, given: str, expected: object) -> None:
    got = nbparams.check_parameters(typed, {name: given}, text=True)[name]
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lr", "fast"),
        ("lr", None),
        ("lr", float("nan")),
        ("lr", "inf"),
        ("lr", True),
        ("lr", [1.0]),
        ("steps", 1.5),
        ("steps", "30"),
        ("steps", True),
        ("steps", None),
        ("name", 3),
        ("name", None),
        ("flag", 1),
        ("flag", "yes"),
        ("ranks", 4),
        ("ranks", [4.5]),
        ("ranks", [None]),
        ("scales", ["x"]),
        ("scales", [float("inf")]),
        ("limit", 1.5),
        ("nothing", float("nan")),
        ("lr", 10**400),
    ],
)
def test_wrong_yaml_values_are_refused_by_name(typed: Path, name: str, given: object) -> None:
    with pytest.raises(nbparams.ParameterError, match=rf"typed.ipynb: {name} = "):
        nbparams.check_parameters(typed, {name: given})


@pytest.mark.parametrize(
    ("name", "given"),
    [("lr", "None"), ("lr", "nan"), ("lr", "-inf"), ("steps", "3.0"), ("steps", "1e3"), ("flag", "1"), ("ranks", "4"), ("ranks", "[")],
)
def test_wrong_words_are_refused_by_name(typed: Path, name: str, given: str) -> None:
    with pytest.raises(nbparams.ParameterError, match=rf"typed.ipynb: {name} = "):
        nbparams.check_parameters(typed, {name: given}, text=True)


def test_unknown_names_are_refused_with_close_ones_and_all_faults_at_once(typed: Path) -> None:
    with pytest.raises(nbparams.ParameterError, match=r"'lrr'; did you mean lr\?.*steps = 'x'.*'zzz'; it has: lr, steps"):
        nbparams.check_parameters(typed, {"lrr": 0.5, "steps": "x", "zzz": 1})


@pytest.mark.parametrize(
    "source", ["x = 2 * y", "import os", "x = (1, 2)", "x = {1, 2}", "a = b = 1", "x: complex = 1", "x +", "print(1)", "x = [(1,)]"]
)
def test_a_parameters_cell_that_computes_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(nbparams.ParameterError, match="may hold only"):
        nbparams.notebook_parameters(write(tmp_path / "n.ipynb", source))


def test_exactly_one_parameters_cell(tmp_path: Path) -> None:
    none = write(tmp_path / "none.ipynb", "lr = 0.1", "print(lr)", tag=None)
    two = write(tmp_path / "two.ipynb", "lr = 0.1", "lr = 0.2")
    nb = nbformat.read(two, as_version=4)
    nb.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(nb, two)
    for path, count in ((none, 0), (two, 2)):
        with pytest.raises(nbparams.ParameterError, match=f"{count} code cells are tagged"):
            nbparams.check_parameters(path, {})


def test_parameter_file_faults_are_all_named_before_any_kernel_starts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    mark = tmp_path / "started"
    cell = f"open({str(mark)!r}, 'w')"
    a = write(tmp_path / "nb/a.ipynb", "lr = 0.1", cell)
    write(tmp_path / "nb/b.ipynb", "lr = 0.1", cell)
    file = tmp_path / "p.yaml"
    out = tmp_path / "out"
    cases = [
        ("aa: {lr: 1}", [], "no notebook 'aa'; did you mean a"),
        ("a: {lrr: 1}", [], "did you mean lr?"),
        ("a: 3", [], "expected a mapping"),
        ("a: {lr: 1}\na: {lr: 2}", [], "given twice: a"),
        ("a: {lr: [", [], "while parsing"),
        ("", ["-p", "lrr", "1"], "did you mean lr?"),
        ("b: {lr: 1}", ["-p", "lr", "x"], "expected a finite float"),
        ("", [str(tmp_path / "no.ipynb")], "no such notebook"),
        ("", [str(a)], "same name"),
        ("", ["-p", "lr", "1", "-p", "lr", "2"], "given twice"),
        ("", [str(file)], "not"),
    ]
    for text, args, needle in cases:
        file.write_text(text)
        assert status([str(a), *args, "-o", str(out), "-f", str(file)]) == 2, (text, args)
        assert needle in capsys.readouterr().err, (text, args)
    assert not mark.exists() and not out.exists()


# ------------------------------------------------------------------ running


def test_values_reach_the_notebook_and_machine_details_stay_out(tmp_path: Path) -> None:
    cells = (DEFAULTS, "import os, sys\nprint(repr((lr, steps, name, flag, ranks, limit)))\nprint(os.getcwd())\nprint(sys.executable)")
    source = write(tmp_path / "{odd} name/typed.ipynb", *cells, kernelspec=KERNELSPEC)
    before = source.read_bytes()
    file = tmp_path / "p.yaml"
    file.write_text("typed:\n  lr: 1e-5\n  steps: 5\n  ranks: [8]\n")
    done = run(source, "-o", tmp_path / "out", "-f", file, "-p", "steps", "7", "-p", "name", "it's", "-p", "limit", "2", "--show")
    assert done.returncode == 0, done.stderr
    expected = '(1e-05, 7, "it\'s", False, [8], 2)'
    assert expected in done.stdout  # --show
    assert printed(tmp_path / "out/typed.ipynb").splitlines() == [expected, str(source.parent), sys.executable]
    assert source.read_bytes() == before
    nb = nbformat.read(tmp_path / "out/typed.ipynb", as_version=4)
    assert nb.metadata.kernelspec.name == "python3"
    assert str(tmp_path) not in json.dumps(nb.metadata)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["typed.ipynb"]


def test_one_failed_notebook_does_not_hide_the_others(tmp_path: Path) -> None:
    bad = write(tmp_path / "a.ipynb", "n = 1", "print('before')", "1 / 0", "print('never')")
    good = write(tmp_path / "b.ipynb", "n = 1", "print('fine')")
    dead = write(tmp_path / "c.ipynb", "n = 1", "import os; os._exit(3)")
    done = run(bad, good, dead, "-o", tmp_path / "out")
    assert done.returncode == 1
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line[:3] in ("a  ", "b  ", "c  ")}
    assert rows == {"a": "failed", "b": "ok", "c": "failed"}
    assert "ZeroDivisionError: division by zero" in done.stdout and "1 of 3 notebooks ok" in done.stdout
    assert printed(tmp_path / "out/a.ipynb") == "before\n" and printed(tmp_path / "out/b.ipynb") == "fine\n"
    assert marked() == []


# A child, a child in a session of its own, and a daemon whose parent has ended, in a session of its own too.
SPAWN = """
import subprocess, sys, time, os
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleep)
apart = subprocess.Popen(sleep, start_new_session=True)
start = f"import subprocess; p = subprocess.Popen({sleep!r}, start_new_session=True, stdout=-3, stderr=-3); print(p.pid)"
daemon = int(subprocess.run([sys.executable, "-c", start], capture_output=True, text=True).stdout)
open("pids", "w").write(f"{os.getpid()} {child.pid} {apart.pid} {daemon}")
"""


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


def test_every_process_is_gone_after_a_failed_cell(tmp_path: Path) -> None:
    done = run(write(tmp_path / "n.ipynb", "n = 1", SPAWN, "raise RuntimeError('boom')"), "-o", tmp_path / "out")
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert done.returncode == 1 and "RuntimeError: boom" in done.stdout and len(pids) == 4
    assert gone(pids) and marked() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_process_is_gone_after_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    first = write(tmp_path / "n.ipynb", "n = 1", SPAWN, "time.sleep(300)")
    second = write(tmp_path / "second.ipynb", "n = 1", "open('second ran', 'w')")
    env = os.environ | {"NBRUN_TEST": str(os.getpid())}
    process = subprocess.Popen(command(first, second, "-o", tmp_path / "out"), stdout=subprocess.PIPE, text=True, env=env)
    end = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 4:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    process.send_signal(number)
    process.send_signal(number)  # an impatient second one changes nothing
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "n         interrupted" in out and "second    not run" in out and not (tmp_path / "second ran").exists()
    assert gone(pids) and marked() == []
    assert not list((tmp_path / "out").glob(".*"))


def test_a_kernel_that_loses_a_port_race_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = tmp_path / "tries"
    code = (
        f"import runpy, sys; f = open({str(tries)!r}, 'a'); f.write('x'); f.close(); n = len(open(f.name).read())\n"
        "if n <= FAIL: sys.exit('Address already in use')\n"
        "runpy.run_module('ipykernel_launcher', run_name='__main__')"
    )
    notebook = write(tmp_path / "n.ipynb", "n = 1", "print('ran')")
    for fail, status in ((1, "ok"), (5, "failed")):
        tries.write_text("")
        start = [sys.executable, "-c", code.replace("FAIL", str(fail)), "-f", "{connection_file}"]
        monkeypatch.setattr(nbrun, "kernel_command", lambda start=start: start)
        result = nbrun.run_notebook(notebook, {}, tmp_path / "out.ipynb")
        assert result.status == status and len(tries.read_text()) == 2, result
    assert "did not start in two attempts" in result.detail


def test_eight_at_once_all_finish(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "n = 1", "print(n * 2)")
    running = [subprocess.Popen(command(notebook, "-o", tmp_path / f"out{i}", "-p", "n", i), stdout=subprocess.DEVNULL) for i in range(8)]
    assert [p.wait(timeout=180) for p in running] == [0] * 8
    assert [printed(tmp_path / f"out{i}/n.ipynb") for i in range(8)] == [f"{2 * i}\n" for i in range(8)]


def test_peak_memory_counts_the_kernel_and_its_children(tmp_path: Path) -> None:
    small = nbrun.run_notebook(write(tmp_path / "s.ipynb", "n = 1"), {}, tmp_path / "out_s.ipynb")
    spike = nbrun.run_notebook(write(tmp_path / "k.ipynb", "n = 1", "x = bytearray(400 * 2**20); del x"), {}, tmp_path / "out_k.ipynb")
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; x = bytearray(400 * 2**20); time.sleep(2)'])"
    child = nbrun.run_notebook(write(tmp_path / "c.ipynb", "n = 1", code), {}, tmp_path / "out_c.ipynb")
    mib = [r.peak_bytes / 2**20 for r in (small, spike, child)]
    assert 20 < mib[0] < 300
    assert all(380 < m - mib[0] < 480 for m in mib[1:]), mib


def test_in_place_writes_outputs_without_traces_and_nothing_when_a_cell_fails(tmp_path: Path) -> None:
    good = write(tmp_path / "g.ipynb", "n = 2", "print(n)", kernelspec=KERNELSPEC)
    bad = write(tmp_path / "b.ipynb", "n = 2", "print(n)\n1 / 0")
    before = bad.read_bytes()
    done = run(good, bad, "--in-place")
    assert done.returncode == 1 and bad.read_bytes() == before
    nb = nbformat.read(good, as_version=4)
    assert printed(good) == "2\n" and nb.cells[1].execution_count == 2
    assert "papermill" not in good.read_text() and nb.metadata.kernelspec == nbrun.KERNELSPEC
    assert "execution" not in nb.cells[1].metadata and nb.cells[0].metadata.tags == ["parameters"]
    first = good.read_bytes()
    assert run(good, "--in-place").returncode == 0 and good.read_bytes() == first  # a second run changes no byte
    for args in ([good, "--in-place", "-p", "n", "3"], [good, "-o", tmp_path], [good], ["-o", tmp_path / "o"]):
        assert status([*map(str, args)]) == 2


def test_all_takes_the_folder_notebooks(tmp_path: Path) -> None:
    write(tmp_path / "notebooks/00_a.ipynb", "n = 1", "print('a')")
    write(tmp_path / "notebooks/01_b.ipynb", "n = 1", "print('b')")
    done = run("--all", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in sorted((tmp_path / "out").iterdir())] == ["00_a.ipynb", "01_b.ipynb"]
