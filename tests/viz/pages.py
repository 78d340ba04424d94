"""Pages in a browser without a window: run a script in one, look at its picture."""

from __future__ import annotations

import html
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2.viz import browser

needs_browser = pytest.mark.skipif(browser.find_browser() is None, reason="no Chromium or Chrome on this machine")

# waits until the page is drawn, runs the test's script, leaves its result in the page
_RUNNER = """
<script type="module">
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const press = (key) => page.view.root.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const point = (type, target, clientX, clientY) => target.dispatchEvent(
  new PointerEvent(type, { clientX, clientY, bubbles: true }));
let page, result;
try {
  while (!document.documentElement.dataset.ready) await sleep(20);
  page = globalThis.mrv2;
  await sleep(100);
  result = await (async () => { %s })();
} catch (error) { result = { error: String(error.stack || error) }; }
const text = JSON.stringify(result, (key, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value));
document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "result", textContent: text }));
</script></body>"""


def run_script(text: str, script: str, folder: Path, size: tuple[int, int] = (1300, 900)) -> Any:
    """Open a page, run `script` (JavaScript with `page`, `sleep`, `press`, `point`) in it, return what it returns."""
    file = folder / "page.html"
    file.write_text(text.replace("</body>", _RUNNER % script), encoding="utf-8")
    dom = browser.run_page(file, "--dump-dom", f"--window-size={size[0]},{size[1]}")
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, f"the page left no result: {dom[-500:]}"
    result = json.loads(html.unescape(found[1]))
    assert not (isinstance(result, dict) and "error" in result), result
    return result


def pixels(picture: Path) -> np.ndarray:
    """Return the picture of an 8-bit PNG; uint8 [height, width, 3]."""
    data = picture.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and kind in (2, 6), f"depth {depth}, colour type {kind}"
    packed, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    size = 3 if kind == 2 else 4
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * size)
    out = np.zeros((height + 1, width + 1, size), np.uint8)
    for y in range(height):
        line = lines[y, 1:].reshape(width, size)
        _unfilter(int(lines[y, 0]), line, out[y], out[y + 1])
    return out[1:, 1:, :3]


def _unfilter(kind: int, line: np.ndarray, above: np.ndarray, out: np.ndarray) -> None:
    """Undo the PNG filter of one line; `above` and `out` have one empty pixel at the left."""
    if kind == 0:
        out[1:] = line
    elif kind == 1:
        out[1:] = np.cumsum(line, axis=0, dtype=np.uint8)
    elif kind == 2:
        out[1:] = line + above[1:]
    else:
        for x in range(len(line)):
            left, up, corner = (v.astype(np.int16) for v in (out[x], above[x + 1], above[x]))
            if kind == 3:
                guess = (left + up) // 2
            else:
                pull = left + up - corner
                by = np.stack([np.abs(pull - v) for v in (left, up, corner)])
                guess = np.choose(by.argmin(axis=0), [left, up, corner])
            out[x + 1] = line[x] + guess.astype(np.uint8)
