"""Run a notebook without Jupyter, and turn what it showed into one HTML page without JavaScript.

    python scripts/notebook_report.py run notebooks/04_async_scheduling.py -o 04.ipynb    # on the machine with the GPU
    python scripts/notebook_report.py page 04.ipynb -o traces/reports/04_h200.html       # where plotly and Chromium are

`run` needs what the notebook itself needs and nothing more; its cells run in this process, in order. What was shown is
written after each cell, and a cell that fails ends the run. `page` draws plotly figures as SVG.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import html
import io
import json
import os
import platform
import re
import sys
import traceback
from pathlib import Path
from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"
MAX_BYTES = 2_000_000
STYLE = """
body { max-width: 1150px; margin: 2em auto; padding: 0 1em; font: 15px/1.55 system-ui, sans-serif; color: #1f2328; }
pre { background: #f6f8fa; padding: .7em; overflow-x: auto; font-size: 13px; } pre.out { background: none; margin: 0; }
code { background: #f0f2f4; padding: 0 .25em; } pre code { background: none; padding: 0; }
details > summary { cursor: pointer; color: #59636e; } figure { margin: 0; overflow-x: auto; }
td, th { padding: .2em .7em; border-bottom: 1px solid #d8dee4; text-align: left; } .error { color: #b3261e; }
"""


def cells_of(source: str) -> list[tuple[str, str, bool]]:
    """Return (kind, text, folded) of each cell of a py:percent text; what stands before the first is its header."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            text = "\n".join(re.sub(r"^# ?", "", line) for line in body.strip("\n").splitlines())
            found.append(("markdown", text, False))
        else:
            found.append(("code", body.strip("\n"), "source_hidden" in head))
    return found


def bundle_of(value: Any) -> dict[str, Any]:
    """Return how a value shows itself, as a notebook would ask it, without widgets."""
    if hasattr(value, "to_plotly_json"):
        return {PLOTLY: json.loads(value.to_json())}
    bundle: dict[str, Any] = {"text/plain": repr(value)}
    if hasattr(value, "_repr_mimebundle_"):
        shown = value._repr_mimebundle_()
        bundle |= shown[0] if isinstance(shown, tuple) else shown
    if hasattr(value, "_repr_html_"):
        bundle["text/html"] = value._repr_html_()
    return {kind: data for kind, data in bundle.items() if "widget-view" not in kind}


def run_cell(text: str, names: dict[str, Any], number: int) -> tuple[list[dict[str, Any]], bool]:
    """Execute a cell; return its outputs, and whether it failed."""
    outputs: list[dict[str, Any]] = []
    printed = io.StringIO()
    failed = False
    tree = ast.parse(text)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]  # an Expr has a value
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            value = eval(compile(last, f"<cell {number}>", "eval"), names) if last is not None else None
            if value is not None and not text.rstrip().endswith(";"):
                shown = {"data": bundle_of(value), "metadata": {}, "output_type": "display_data"}
                outputs.append(shown)
        except Exception:  # the page shows whatever went wrong
            failed = True
            outputs.append({"output_type": "stream", "name": "stderr", "text": traceback.format_exc(limit=4)})
    if printed.getvalue():
        outputs.insert(0, {"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    return outputs, failed


def run(source: Path, target: Path) -> int:
    """Run a notebook's .py in its own folder and write what it showed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    target, text = target.resolve(), source.read_text(encoding="utf-8")
    os.chdir(source.parent)
    # solutions are shown as answers, so that the page has no open questions
    os.environ.setdefault("MRV2_EXERCISES", "solve")
    made, failed = [], False
    for number, (kind, body, folded) in enumerate(cells_of(text)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number:02d}", "metadata": {}, "source": body}
        if kind == "code":
            outputs: list[dict[str, Any]] = []
            if not failed:
                outputs, failed = run_cell(body, names, number)
                print(f"cell {number}: {'FAILED' if failed else 'done'}", file=sys.stderr, flush=True)
            cell |= {"execution_count": None, "outputs": outputs}
            cell["metadata"] = {"jupyter": {"source_hidden": True}} if folded else {}
        made.append(cell)
        # after each cell: a run that is killed leaves what it has shown
        done = {"cells": made, "metadata": {"executed": machine()}, "nbformat": 4, "nbformat_minor": 5}
        target.write_text(json.dumps(done), encoding="utf-8")
    return int(failed)


def machine() -> str:
    """Say on what the cells ran, as far as they have looked."""
    python, torch = f"Python {platform.python_version()}", sys.modules.get("torch")
    if torch is None:
        return f"Executed with {python}"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a GPU"
    return f"Executed on {where}, torch {torch.__version__}, {python}"


def page(source: Path, target: Path) -> int:
    """Write the page of an executed notebook; fails if it is too large to be kept in git."""
    notebook = json.loads(source.read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(markdown(text))
            continue
        code = f"<pre><code>{html.escape(text)}</code></pre>"
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden")
        parts.append(f"<details><summary>code</summary>{code}</details>" if folded else code)
        parts += [output_html(output) for output in cell["outputs"]]
    if "executed" in notebook["metadata"]:
        parts.insert(1, f"<p><small>{html.escape(notebook['metadata']['executed'])}</small></p>")
    title = re.sub(r"<[^>]+>", "", parts[0].split("</h1>")[0]) if parts else source.stem
    body = "\n".join(parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    target.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>", encoding="utf-8")
    size = target.stat().st_size
    print(f"{target}: {size / 1e6:.2f} MB")
    return int(size > MAX_BYTES)


def output_html(output: dict[str, Any]) -> str:
    """Return one output as HTML; a figure as SVG."""
    if output["output_type"] == "stream":
        kind = "out error" if output["name"] == "stderr" else "out"
        return f"<pre class='{kind}'>{html.escape(''.join(output['text']))}</pre>"
    data = output.get("data", {})
    if PLOTLY in data:
        import plotly.graph_objects as go

        parts = {key: data[PLOTLY][key] for key in ("data", "layout") if key in data[PLOTLY]}
        picture = go.Figure(parts, skip_invalid=True).to_image(format="svg", width=1100)
        return (
            f"<figure><img alt='figure' src='data:image/svg+xml;base64,{base64.b64encode(picture).decode()}'></figure>"
        )
    if "image/png" in data:
        return f"<img alt='picture' src='data:image/png;base64,{data['image/png']}'>"
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"<pre class='out'>{html.escape(''.join(data.get('text/plain', '')))}</pre>"


def markdown(text: str) -> str:
    """Return the notebooks' markdown as HTML: headings, paragraphs, lists, tables, fences."""
    parts = []
    for block in re.findall(r"```.*?```|(?:(?!```)(?!\n\n).)+", text, re.DOTALL):
        block = block.strip("\n")
        if block.startswith("```"):
            parts.append(f"<pre>{html.escape(re.sub(r'^```.*|```$', '', block).strip(chr(10)))}</pre>")
        elif match := re.match(r"(#+) (.*)", block):
            parts.append(f"<h{len(match[1])}>{inline(match[2])}</h{len(match[1])}>")
            rest = block.partition("\n")[2]
            parts += [markdown(rest)] if rest.strip() else []
        elif block.startswith("|"):
            rows = [line.strip("|").split("|") for line in block.splitlines() if not re.fullmatch(r"[|\s:-]+", line)]
            parts.append(
                "<table>" + "".join(f"<tr>{''.join(f'<td>{inline(c)}</td>' for c in row)}</tr>" for row in rows)
            )
            parts.append("</table>")
        elif re.match(r"(- |\d+\. )", block):
            items = re.split(r"^(?:- |\d+\. )", block, flags=re.MULTILINE)[1:]
            parts.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>")
        elif block.strip():
            parts.append(f"<p>{inline(block)}</p>")
    return "\n".join(parts)


def inline(text: str) -> str:
    """Return a line's markdown as HTML; links into the repository keep their text only."""
    out = html.escape(text.strip(), quote=False)
    out = re.sub(r"`([^`]+)`", r"<code>\1</code>", out)
    out = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", out)
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", out)


def main() -> int:
    """Do what the command line asks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "page"))
    parser.add_argument("source", type=Path, help="run: a notebook's .py; page: what `run`, or Jupyter, has written")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    return (run if args.action == "run" else page)(args.source, args.output)


if __name__ == "__main__":
    sys.exit(main())
