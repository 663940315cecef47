"""Notebooks as people use them: a real JupyterLab in a real headless Chromium, Run All, everything rendered.

The server works on a copy of the notebooks, since JupyterLab saves by itself. Needs Debian's packages chromium and
chromium-driver (`make test` installs them when it may).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 420.0  # seconds for one notebook; each is meant to take three minutes at most
NOTEBOOKS = [p for stem in ("00", "03", "05") for p in sorted((ROOT / "notebooks").glob(f"{stem}_*.ipynb"))]
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,1800",
]

GENERATED = [
    "import time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(20), desc='steps'):\n    time.sleep(0.02)",
    "import numpy as np\nfrom matplotlib import pyplot as plt\nfrom logra_core.lab.figures import theme\ntheme()",
    "for i in range(3):\n    plt.plot(np.linspace(0, 1, 9), np.linspace(0, i, 9), label=str(i))\nplt.title('three lines')\nplt.show()",
    "print('printed', np.arange(3).sum())",
]

# What the page holds, read from JupyterLab's own model of the open notebook and from the rendered page.
STATE = """
const app = window.jupyterapp, panel = app && app.shell.currentWidget;
if (!panel || !panel.context || !panel.context.isReady || !panel.content.widgets) return null;
const cells = panel.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.source.trim());
const outputs = cells.map(c => c.model.outputs.toJSON()).flat();
const kernel = panel.sessionContext.session && panel.sessionContext.session.kernel;
const shown = e => e.getClientRects().length > 0;
const all = selector => [...panel.content.node.querySelectorAll(selector)].filter(shown);
return {
  status: kernel ? kernel.status : 'none',
  counts: cells.map(c => c.model.executionCount),
  errors: outputs.filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue),
  widgets: outputs.filter(o => o.data && 'application/vnd.jupyter.widget-view+json' in o.data).length,
  images: outputs.filter(o => o.data && ('image/png' in o.data || 'image/svg+xml' in o.data)).length,
  shownWidgets: all('.jp-OutputArea-output .jupyter-widgets').filter(e => !e.parentElement.closest('.jupyter-widgets')).length,
  progress: all('.jupyter-widgets .progress-bar, .jupyter-widgets [role=progressbar]').length,
  broken: all('.jp-OutputArea-output').filter(e => /Error displaying widget|Loading widget|javascript error/.test(e.innerText)).length,
  shownImages: all('.jp-OutputArea-output :is(img, svg)').filter(e => !('naturalWidth' in e) || e.naturalWidth > 50).length,
};
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def generated(folder: Path) -> Path:
    nb = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    )
    nb.cells = [nbformat.v4.new_markdown_cell("# A small notebook with $S = G A^\\top$"), *map(nbformat.v4.new_code_cell, GENERATED)]
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, folder / "generated.ipynb")
    return folder / "generated.ipynb"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address (with token) of a JupyterLab that serves a copy of the notebooks without their outputs."""
    home = tmp_path_factory.mktemp("lab")
    generated(home / "copy/notebooks")
    for path in NOTEBOOKS:
        nb = nbformat.read(path, as_version=4)
        for cell in nb.cells:
            if cell.cell_type == "code":  # what is seen after Run All was made by it
                cell.outputs, cell.execution_count = [], None
        nbformat.write(nb, home / "copy/notebooks" / path.name)
    (home / "copy/data").symlink_to(ROOT / "data")
    settings = home / "settings/@jupyterlab"
    for plugin, values in (
        ("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}),
        ("notebook-extension/tracker", {"windowingMode": "none"}),
    ):
        (settings / plugin).parent.mkdir(parents=True, exist_ok=True)
        (settings / f"{plugin}.jupyterlab-settings").write_text(json.dumps(values))
    port, token = free_port(), secrets.token_hex(16)
    env = os.environ | {
        "JUPYTER_TOKEN": token,
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "share"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "LOGRA_FIGURES": str(home / "copy/figures"),
        "HF_HUB_OFFLINE": "1",
    }
    args = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={home / 'copy'}",
        "--expose-app-in-browser",
        "--LabApp.extension_manager=readonly",
    ]
    log = open(home / "lab.log", "w+")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *args], env=env, cwd=home / "copy", stdout=log, stderr=log, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 90
        while True:
            assert server.poll() is None and time.monotonic() < end, Path(log.name).read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        yield f"{url}/lab/tree/notebooks/{{}}?token={token}&reset"
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        log.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium or chromedriver on PATH: `apt-get install chromium chromium-driver` (as root, `make test` does it)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


def wait(browser, condition, limit: float, what: str) -> dict:
    end, state = time.monotonic() + limit, None
    while time.monotonic() < end:
        state = browser.execute_script(STATE)
        if state is not None and condition(state):
            return state
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen within {limit:.0f} s: {state}")


def run_all(browser, address: str) -> dict:
    """Open a notebook, choose Run > Run All Cells as a person would, and return the state when it is done or failed."""
    from selenium.webdriver.common.by import By

    browser.get(address)
    wait(browser, lambda s: s["status"] == "idle" and s["counts"], 120, "an open notebook with an idle kernel")
    next(e for e in browser.find_elements(By.CSS_SELECTOR, "#jp-MainMenu .lm-MenuBar-item") if e.text == "Run").click()
    end = time.monotonic() + 20
    while not (entries := browser.find_elements(By.CSS_SELECTOR, '.lm-Menu-item[data-command="runmenu:run-all"]')):
        assert time.monotonic() < end, "the Run menu did not open"
        time.sleep(0.2)
    entries[0].click()
    wait(browser, lambda s: s["errors"] or (None not in s["counts"] and s["status"] == "idle"), LIMIT, "the end of Run All")
    end = time.monotonic() + 20  # the page draws after the kernel is done
    while (state := browser.execute_script(STATE)) and time.monotonic() < end:
        if state["errors"] or (state["shownImages"] >= state["images"] and state["shownWidgets"] >= state["widgets"]):
            break
        time.sleep(0.5)
    return state


@pytest.mark.parametrize("name", ["generated.ipynb", *(p.name for p in NOTEBOOKS)])
def test_run_all_in_a_browser(lab: str, browser, name: str) -> None:
    state = run_all(browser, lab.format(name))
    if os.environ.get("LAB_SCREENSHOTS"):
        browser.save_screenshot(str(Path(os.environ["LAB_SCREENSHOTS"]) / f"{Path(name).stem}.png"))
    assert state["errors"] == [] and None not in state["counts"] and state["counts"] == sorted(state["counts"])
    assert state["images"] >= 1 and state["shownImages"] >= state["images"], state
    assert state["shownWidgets"] >= state["widgets"] and state["broken"] == 0, state
    if name == "generated.ipynb":
        assert (state["images"], state["widgets"], state["progress"]) == (1, 1, 1), state


def test_a_failing_cell_is_seen(lab: str, browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The checks above can fail: the same notebook with an error in its second cell."""
    folder = next(tmp_path_factory.getbasetemp().glob("lab*/copy/notebooks"))
    nb = nbformat.read(folder / "generated.ipynb", as_version=4)
    nb.cells[2].source = "raise RuntimeError('boom')"
    nbformat.write(nb, folder / "failing.ipynb")
    state = run_all(browser, lab.format("failing.ipynb"))
    assert state["errors"] == ["RuntimeError: boom"] and state["counts"][-1] is None
