"""Builds the notebooks from ``sources/*.md`` and runs them, and draws README's pictures.

    python notebooks/build.py               all notebooks and pictures
    python notebooks/build.py 04 pictures   those whose name starts so; "pictures" for README's

A source is Markdown: each block fenced as ``python`` is a code cell, the text between blocks a text cell. Needs iosim,
nbformat and nbclient (``pip install '.[test]'``).
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "sources"
PICTURES = HERE / "pictures"
#: README's pictures: file name -> the iosim command that draws it.
COMMANDS = {
    "compare.png": "compare --gpu a100_sxm4_80gb,h100_sxm --plot {}",
    "roofline.png": "roofline --gpu h100_sxm -o {}",
    "io.png": "io --gpu h100_sxm -o {}",
    "io_l2.png": "io --against l2 --algorithm fa2,fa3 --batch 1 --kv-heads 4 --seqlen 16384 --values 3,6,12,25,50,100 "
    "-o {}",
    "io_sram.png": "io --against sram --gpu a100_sxm4_80gb --head-dim 64 --seqlen 4096 --no-causal -o {}",
    "scale.png": "scale --gpu h100_sxm -o {}",
    "timeline_sm.png": "timeline --view sm -o {}",
    "timeline_gpu.png": "timeline --view gpu --batch 1 --seqlen 4096 -o {}",
}


def notebook_of(source: Path):
    """The notebook that ``source`` describes, without outputs. Cell ids follow their place: a rebuild is no change."""
    import nbformat

    cells: list = []
    # every second part of the text between fences is code
    parts = re.split(r"^```python\n(.*?)^```$\n?", source.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for index, part in enumerate(parts):
        text = part.strip("\n")
        if text.strip():
            make = nbformat.v4.new_code_cell if index % 2 else nbformat.v4.new_markdown_cell
            cells.append(make(text, id=f"cell-{len(cells):02d}"))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def run(notebook, timeout_s: int = 300):
    """Execute ``notebook`` in place with this checkout importable, and drop what differs between two runs."""
    from nbclient import NotebookClient

    environment = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), environment]))
    try:
        NotebookClient(notebook, timeout=timeout_s, kernel_name="python3").execute()
    finally:
        os.environ["PYTHONPATH"] = environment
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def build(source: Path) -> None:
    """Run ``source`` and write its notebook beside the folder of sources."""
    import nbformat

    started = time.perf_counter()
    notebook = run(notebook_of(source))
    target = HERE / f"{source.stem}.ipynb"
    text = nbformat.writes(notebook)
    target.write_text(text + "\n", encoding="utf-8")
    print(f"{target.name}: {time.perf_counter() - started:.0f} s, {len(text) / 1e3:.0f} kB", flush=True)


def draw_pictures() -> None:
    """Draw README's pictures with the commands of :data:`COMMANDS`; their CSVs lie beside them."""
    sys.path.insert(0, str(HERE.parent))
    from simulator.cli import main

    PICTURES.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        code = main(command.format(PICTURES / name).split())
        if code:
            raise SystemExit(f"iosim {command.format(name)}: exit code {code}")


def main_build(wanted: list[str]) -> None:
    """Build what ``wanted`` names (everything when empty)."""
    sources = sorted(SOURCES.glob("*.md"))
    known = [source.stem for source in sources] + ["pictures"]
    for name in wanted:
        if not any(stem.startswith(name) for stem in known):
            raise SystemExit(f"{name}: names no notebook; there are {', '.join(known)}")
    for source in sources:
        if not wanted or any(source.stem.startswith(name) for name in wanted):
            build(source)
    if not wanted or "pictures" in wanted:
        draw_pictures()


if __name__ == "__main__":
    main_build(sys.argv[1:])
