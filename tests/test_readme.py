"""README's examples work as printed: Python, YAML, command lines, links, and places for computed numbers."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from simulator import AttentionProblem, load_profile
from simulator.cli import app
from simulator.model_run import train
from simulator.model_times import Simulator
from simulator.model_zoo import load_model
from simulator.predict import predict_frame
from simulator.sweep.designs import points_of
from simulator.sweep.spec import read_spec

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GROUP = typer.main.get_command(app)


def blocks(language: str) -> list[str]:
    """Fenced blocks of ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """Every ``iosim ...`` of README, in text and in blocks, without alternatives (``a|b``) and comments."""
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"`(iosim [^`]+)`", prose)
    lines += [line for block in blocks("bash") for line in block.splitlines() if line.startswith("iosim ")]
    return [line.split("  #")[0].replace("[NAME]", "") for line in lines]


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_options_exist(line):
    name, *arguments = shlex.split(line)[1:]
    context = typer.Context(GROUP)
    command = GROUP.get_command(context, name.rstrip(","))
    assert command is not None, f"no command {name!r}"
    known = {option for parameter in command.params for option in parameter.opts}
    for argument in arguments:
        if argument.startswith("-"):
            assert argument.partition("=")[0] in known, f"{name} has no option {argument}"


def test_python_example_runs(capsys):
    [example] = blocks("python")
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("fa3 (flash_attn_3) on h100_sxm: ")
    assert names["result"].time_us > 0


def test_profile_example_loads(tmp_path):
    example, _, _ = blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(example, encoding="utf-8")
    assert yaml.safe_load(example)["base"] == "h100_sxm"
    mine, base = load_profile(path), load_profile("h100_sxm")
    assert mine.hbm_bandwidth_bytes_per_s == 5e12
    assert mine.l2_bytes == base.l2_bytes


def test_model_example_runs(tmp_path):
    _, example, _ = blocks("yaml")
    path = tmp_path / "tiny.yaml"
    path.write_text(example, encoding="utf-8")
    model = load_model(path)
    assert model.parameter_count() == 1_100_048_384 and model.doubt() is None
    run = train(model, Simulator(load_profile("h100_sxm")), batch=1, seqlen=256, dropout=0.0)
    assert run.time_us > 0 and not any("parameters" in note for note in run.notes)


def test_sweep_example_is_a_design_space(tmp_path):
    _, _, example = blocks("yaml")
    path = tmp_path / "space.yaml"
    path.write_text(example, encoding="utf-8")
    spec = read_spec(path)
    assert len(points_of(spec)) == 10_000 and spec.tiles == "auto"


def test_columns_of_predict_are_all_named():
    import pandas as pd

    row = {"algorithm": "fa2", "batch": 1, "heads": 1, "seqlen_q": 128, "head_dim": 64}
    out = predict_frame(pd.DataFrame([row]), "h100_sxm")
    for column in out.columns:
        assert f"`{column}`" in README, f"README does not name predict's column {column}"
    for field in AttentionProblem.__dataclass_fields__:
        assert f"`{field.rstrip('_')}`" in README, f"README does not name predict's column {field.rstrip('_')}"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!https?:)[^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_every_computed_table_has_its_place():
    script = runpy.run_path(str(ROOT / "notebooks" / "readme_numbers.py"))
    places = re.findall(r"<!-- numbers: (\w+) -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)
    assert [name for name, _ in places] == list(script["TABLES"])
