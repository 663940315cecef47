"""Run notebooks headlessly with papermill, strictly: `python -m logra_core.lab.nbrun NOTEBOOK [...] -o OUTDIR -p NAME VALUE`.

Belongs here: starting a kernel of this very interpreter, watching its memory, stopping every process it started, and
the summary. `nbparams` checks the parameters first; papermill itself injects them and runs the cells.
Needs the `notebooks` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import yaml

from .nbparams import ParameterError, plan, read_parameter_file

MARKER = "LOGRA_NBRUN"  # environment variable that marks every process of one run
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class KernelStartError(RuntimeError):
    """The kernel did not come up, at the second attempt either."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM; a KeyboardInterrupt, since asyncio passes only that and SystemExit through."""


@dataclass
class Result:
    """One notebook's outcome. seconds: wall time; peak_bytes: highest memory (RSS) of the kernel and all its children."""

    notebook: Path
    status: str  # "ok" | "failed" | "interrupted" | "not run"
    detail: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    output: Path | None = None


# ------------------------------------------------------------------ kernel


def kernel_command() -> list[str]:
    """How this interpreter's kernel starts, whatever kernelspecs are installed on the machine."""
    return [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


class Kernel:
    """One kernel, its client, the memory of its process tree, and the end of all of it.

    km: the jupyter_client manager that papermill is handed. peak_bytes: highest RSS seen, sampled twice a second.
    """

    def __init__(self, folder: Path, start_timeout: float = 60.0) -> None:
        self.mark, self.peak_bytes = uuid.uuid4().hex, 0
        self._seen: dict[int, float] = {}  # pid -> creation time: a pid that was reused is not ours
        self._sid: set[int] = set()  # sessions
        self._done = threading.Event()
        self._clients: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="nbrun", ignore_cleanup_errors=True)
        self.km = None
        try:
            self._start(folder, start_timeout)
        except BaseException:
            self.stop(now=True)
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, folder: Path, timeout: float) -> None:
        from jupyter_client import BlockingKernelClient
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.manager import KernelManager

        class ThisInterpreter(KernelSpecManager):
            def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
                return KernelSpec(argv=kernel_command(), display_name="Python 3", language="python")

        # Sockets in a folder of our own: TCP ports are chosen before the kernel binds them, so parallel starts lose races.
        # A socket's path may have 107 bytes; under a longer temporary folder TCP is used, and a lost race costs one retry.
        transport = "ipc" if os.name == "posix" and len(self._folder.name) < 90 else "tcp"
        for attempt in (1, 2):
            self.km = KernelManager(
                kernel_name="python3", kernel_spec_manager=ThisInterpreter(), transport=transport,
                client_class="jupyter_client.asynchronous.AsyncKernelClient", connection_file=f"{self._folder.name}/{attempt}.json",
            )
            client = None
            try:
                env = os.environ | {MARKER: self.mark}
                self.km.start_kernel(cwd=str(folder), env=env, extra_arguments=["--HistoryManager.enabled=False"])
                self._sid.add(self.km.provisioner.pid)
                client = BlockingKernelClient(parent=self.km, **self.km.get_connection_info(session=True))
                client.start_channels()
                client.wait_for_ready(timeout=timeout)
                break
            except Exception as error:
                self._end(now=True)
                if attempt == 2:
                    raise KernelStartError(f"the kernel did not start in two attempts: {error}") from error
            finally:
                if client is not None:
                    client.stop_channels()
        make = self.km.client
        self.km.client = lambda **kw: self._clients.append(make(**kw)) or self._clients[-1]

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error, AttributeError):  # AttributeError: no kernel was started yet
            root = psutil.Process(self.km.provisioner.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _sample(self) -> None:
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                self._seen.setdefault(process.pid, process.create_time())
                total += process.memory_info().rss
        with contextlib.suppress(OSError, TypeError, AttributeError):  # the kernel's own high-water mark catches what falls between samples
            status = Path(f"/proc/{self.km.provisioner.pid}/status").read_text()
            total = max(total, 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]))
        self.peak_bytes = max(self.peak_bytes, total)

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self._sample()

    def _ours(self) -> list[psutil.Process]:
        """Live processes of this run: of the tree, of the kernel's session, or carrying its mark (daemons left the tree)."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                mine = self._seen.get(process.pid) == process.create_time() or os.getsid(process.pid) in self._sid
                if mine or process.environ().get(MARKER) == self.mark:
                    found.append(process)
        return found

    def _kill(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while (left := self._ours()) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=0.5)

    def _end(self, now: bool) -> None:
        for step in (lambda: self.km.shutdown_kernel(now=now), self.km.cleanup_resources):
            with contextlib.suppress(Exception):  # what is left is killed below
                step()
        self._kill()

    def stop(self, now: bool) -> None:
        """End the kernel and every process it started. now: without giving the kernel time to shut down by itself."""
        self._done.set()
        self._sample()
        for client in self._clients:
            with contextlib.suppress(Exception):
                client.stop_channels()
        if self.km is not None:
            self._end(now)
        self._folder.cleanup()


# ------------------------------------------------------------------ running


def _clean(nb: Any, stem: str, bare: bool) -> None:
    """Drop what differs between machines: folders in papermill's metadata, private kernel names; bare: all of papermill's traces."""
    nb.metadata["kernelspec"] = dict(KERNELSPEC)
    record = nb.metadata.get("papermill")
    if record:
        record["input_path"] = record["output_path"] = f"{stem}.ipynb"
    if bare:
        nb.metadata.pop("papermill", None)
        nb.metadata.get("language_info", {}).pop("version", None)
        for cell in nb.cells:
            cell.metadata.pop("papermill", None)
            cell.metadata.pop("execution", None)
            if cell.metadata.get("tags") == []:
                del cell.metadata["tags"]


def _write(nb: Any, target: Path) -> None:
    part = target.with_name(f".{target.stem}.{os.getpid()}.partial.ipynb")
    try:
        nbformat.write(nb, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


class _Signals:
    """SIGINT and SIGTERM: raise `Interrupted` once, and only while armed, so that nothing cuts a clean-up short."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.armed = False

    def __call__(self, signum: int, frame: Any) -> None:
        self.received = self.received or signum
        self.check()

    def check(self) -> None:
        if self.armed and self.received:
            self.armed = False
            raise Interrupted(signal.Signals(self.received).name)


_signals = _Signals()


def _execute(notebook: Path, parameters: dict[str, Any], part: Path, kernel: Kernel, show: bool) -> None:
    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    source, target = (str(p).replace("{", "{{").replace("}", "}}") for p in (notebook, part))  # papermill formats its paths
    papermill.execute_notebook(
        source, target, parameters=parameters, kernel_name="python3", language="python", km=kernel.km,
        progress_bar=sys.stderr.isatty() and not show, stdout_file=sys.stdout if show else None,
    )


def run_notebook(notebook: Path, parameters: dict[str, Any], output: Path, show: bool = False, in_place: bool = False) -> Result:
    """Run one notebook in its own folder with checked `parameters`; `output` is written whole, also when a cell fails.

    show: print the cells' printed text as it comes. in_place: strip papermill's traces; write nothing when a cell failed.
    Never raises for what the notebook does; an interrupt is the status "interrupted".
    """
    result, kernel, start = Result(notebook, "ok"), None, time.monotonic()
    part = output.with_name(f".{output.stem}.{os.getpid()}.cells.partial.ipynb")
    try:
        try:
            _signals.armed = True
            _signals.check()
            kernel = Kernel(notebook.resolve().parent)
            _execute(notebook, parameters, part, kernel, show)
        except KeyboardInterrupt as error:
            result.status, result.detail = "interrupted", str(error)
        except Exception as error:  # a failed cell, a dead kernel: reported, and the next notebook still runs
            where = f"code cell [{error.exec_count}]: {error.ename}: {error.evalue}" if hasattr(error, "exec_count") else None
            result.status, result.detail = "failed", where or f"{type(error).__name__}: {error}"
        finally:
            _signals.armed = False
    finally:
        result.seconds = time.monotonic() - start
        if kernel is not None:
            kernel.stop(now=result.status == "interrupted")
            result.peak_bytes = kernel.peak_bytes
        with contextlib.suppress(OSError, ValueError):  # interrupted before the first cell, or within a write: no output
            if not (in_place and result.status != "ok"):
                done = nbformat.read(part, as_version=4)
                _clean(done, notebook.stem, bare=in_place)
                _write(done, output)
                result.output = output
        part.unlink(missing_ok=True)
    return result


def run_all(jobs: list[tuple[Path, dict[str, Any]]], folder: Path | None, show: bool = False) -> list[Result]:
    """Run every job, failed ones too, one after the other; outputs go to `folder` (None: in place)."""
    results = []
    for number, (notebook, parameters) in enumerate(jobs, 1):
        if _signals.received or (results and results[-1].status == "interrupted"):
            results.append(Result(notebook, "not run"))
            continue
        given = ", ".join(f"{k}={v!r}" for k, v in parameters.items())
        print(f"[{number}/{len(jobs)}] {notebook.name}" + (f" with {given}" if given else ""), flush=True)
        output = notebook if folder is None else folder / notebook.name
        results.append(run_notebook(notebook, parameters, output, show=show, in_place=folder is None))
    return results


def summary(results: list[Result]) -> str:
    """A table, one row a notebook: result, wall time, peak memory; then the detail of every one that is not ok."""
    width = max([len(r.notebook.stem) for r in results] + [8])
    lines = [f"{'notebook':<{width}}  {'result':<11}  {'time':>8}  {'peak memory':>11}"]
    for r in results:
        lines.append(f"{r.notebook.stem:<{width}}  {r.status:<11}  {r.seconds:>6.1f} s  {r.peak_bytes / 2**30:>7.2f} GiB")
    lines += [f"{r.notebook.name}: {r.status}: {r.detail}" for r in results if r.detail]
    good = sum(r.status == "ok" for r in results)
    return "\n".join([*lines, f"{good} of {len(results)} notebooks ok, {sum(r.seconds for r in results):.1f} s"])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m logra_core.lab.nbrun", description="Run notebooks headlessly, with strict parameters.")
    parser._negative_number_matcher = re.compile(r"^-\.?\d")  # so that -p lr -1e-5 is a value, not an option
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("-o", "--out", type=Path, help="folder for the executed notebooks")
    parser.add_argument("-p", dest="words", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("-f", "--params", type=Path, help="YAML: notebook name -> its parameters")
    parser.add_argument("--all", action="store_true", help="every notebook of the folder notebooks/")
    parser.add_argument("--in-place", action="store_true", help="write the outputs into the notebooks themselves, at their defaults")
    parser.add_argument("--show", action="store_true", help="print what the cells print, as it comes")
    args = parser.parse_args(argv)
    if args.all:
        near = Path("notebooks")
        args.notebooks += sorted((near if near.is_dir() else Path(__file__).resolve().parents[2] / near).glob("*.ipynb"))
    if not args.notebooks:
        parser.error("no notebook given" + (" (the folder notebooks/ holds none)" if args.all else ""))
    if args.in_place == (args.out is not None):
        parser.error("give either -o OUTDIR or --in-place")
    if args.in_place and (args.words or args.params):
        parser.error("--in-place runs at the notebooks' own defaults; it takes no parameters")
    if args.out and any(n.resolve().parent == args.out.resolve() for n in args.notebooks):
        parser.error("-o is the notebooks' own folder; use --in-place to write there")
    if len(dict(args.words)) < len(args.words):
        parser.error("a parameter was given twice with -p")
    return args


def main(argv: list[str] | None = None) -> int:
    """0: all ran. 1: some failed. 2: refused before any kernel started. 128 + signal number: interrupted."""
    args = _arguments(argv)
    try:
        file = read_parameter_file(args.params) if args.params else {}
        jobs = plan(args.notebooks, dict(args.words), file)
    except (ParameterError, OSError, yaml.YAMLError) as error:
        print(f"refused, nothing was run:\n{error}", file=sys.stderr)
        return 2
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _signals)
    results = run_all(jobs, args.out, args.show)
    print(summary(results), flush=True)
    if _signals.received:
        return 128 + _signals.received
    return 0 if all(r.status == "ok" for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
