"""The notebooks: each is its source, runs from end to end in less than a minute, and shows what it ran."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted((NOTEBOOKS / "sources").glob("*.md"))


def _builder():
    spec = importlib.util.spec_from_file_location("notebook_builder", NOTEBOOKS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _builder()


def processor_s() -> float:
    """Processor seconds of this process's children that have ended (a notebook's kernel)."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def names(path: Path) -> str:
    return path.stem


def test_the_seven_notebooks_are_there():
    assert [path.stem[:2] for path in SOURCES] == [f"{i:02d}" for i in range(1, 8)]
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == [path.stem for path in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=names)
def test_committed_notebook_is_its_source_with_outputs(source: Path):
    built = nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", as_version=4)
    nbformat.validate(built)
    cells = BUILDER.notebook_of(source).cells
    assert [(cell.cell_type, cell.source) for cell in built.cells] == [(c.cell_type, c.source) for c in cells], (
        f"rebuild it: python notebooks/build.py {source.stem}"
    )
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any(output.output_type == "execute_result" for output in outputs)
    assert (NOTEBOOKS / f"{source.stem}.ipynb").stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=names)
def test_notebook_runs_in_less_than_a_minute(source: Path):
    before = processor_s()
    notebook = BUILDER.run(BUILDER.notebook_of(source))
    # processor time: what else runs on the machine does not count
    assert 0.5 < processor_s() - before < 60
    printed = [o.text for cell in notebook.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
    assert not printed


def test_a_failing_cell_fails_the_build(tmp_path: Path):
    source = tmp_path / "x.md"
    source.write_text("# Title\n\ntext\n\n```python\nraise ValueError('no')\n```\n")
    notebook = BUILDER.notebook_of(source)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [
        ("markdown", "# Title\n\ntext"),
        ("code", "raise ValueError('no')"),
    ]
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="ValueError"):
        BUILDER.run(notebook)


def test_pictures_of_the_readme_are_there():
    for name in BUILDER.COMMANDS:
        picture = NOTEBOOKS / "pictures" / name
        assert picture.read_bytes().startswith(b"\x89PNG"), f"draw it: python notebooks/build.py pictures ({name})"
        assert picture.stat().st_size < 400_000
        assert picture.with_suffix(".csv").exists()
