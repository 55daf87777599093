"""Files from strangers: whatever is in them, one line says what is wrong, and nothing is executed or half-written."""

import os
import random
import stat

import pytest
from command_line import failure
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator import load_profile
from simulator.atomic_write import write_text
from simulator.calibrate_command import read_split
from simulator.csv_tables import read_table
from simulator.errors import InputError
from simulator.model_zoo import load_model
from simulator.problem import AttentionProblem
from simulator.simulation import simulate
from simulator.sweep.spec import read_spec
from simulator.validation import read_measurements, regime

PROFILE = 'name: mine\nbase: h100_sxm\nnum_sms: {value: 100, kind: assumed, source: "what if"}\n'
SWEEP = (
    "gpu: h100_sxm\nalgorithms: [fa2]\n"
    "hardware:\n  l2_bytes: [x2]\n"
    "problem:\n  seqlen: {from: 128, to: 512, steps: 2}\n"
)
CASES = "algorithm,batch,heads,seqlen_q,head_dim,family,measured_time_us\nfa2,1,2,256,64,a,10\n"
SPLIT = "family,side\na,judge\nb,calibrate\n"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


def read(kind, path):
    """What reads a file of this kind, without simulating."""
    {
        "profile": load_profile,
        "model": load_model,
        "sweep": read_spec,
        "cases": read_table,
        "measurements": lambda path: read_measurements([path]),
        "split": read_split,
    }[kind](path)


def refused(kind, path):
    with pytest.raises(InputError) as caught:
        read(kind, path)
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algorithm;batch;heads\nfa2;1;2\n", "cells have ';' between them; write commas"),
        ("algorithm\tbatch\nfa2\t1\n", r"cells have '\t' between them; write commas"),
        (",".join(f"c{i}" for i in range(100_000)) + "\n", "100,000 columns; a table has at most 1,000"),
    ],
    ids=["semicolons", "tabs", "columns"],
)
def test_tables_of_another_shape(tmp_path, text, says):
    path = tmp_path / "cases.csv"
    path.write_text(text)
    assert refused("cases", path) == f"{path}:1: {says}"


@pytest.mark.parametrize("kind", ["model", "sweep", "cases"])
def test_a_file_without_an_end_is_not_read_for_ever(tmp_path, kind):
    path = tmp_path / "x.yaml"
    path.symlink_to("/dev/zero")
    assert "more than" in refused(kind, path)


@pytest.mark.parametrize("kind", ["profile", "model", "sweep"])
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: *a\n",
        "a: &a\n  b: *a\n",
        "calibration: &a {parameters: *a}\n",
        BOMB,
        "a: !!python/object/apply:os.system ['touch pwned']\n",
        "a: !!python/name:os.system x\n",
        "a: " + "[" * 5000 + "]" * 5000,
        "a: b\n---\nc: d\n",
        "- a\n",
        "",
        "\x00",
    ],
    ids=["alias", "loop", "calibration loop", "bomb", "call", "name", "deep", "two", "list", "empty", "nul"],
)
def test_yaml_is_plain_data(tmp_path, monkeypatch, kind, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.yaml"
    path.write_text(text)
    refused(kind, path)
    assert os.listdir(tmp_path) == ["file.yaml"]


@pytest.mark.parametrize("kind", ["profile", "model", "sweep", "cases", "measurements", "split"])
def test_folders_other_encodings_and_endless_files(tmp_path, kind):
    path = tmp_path / "file.yaml"
    path.mkdir()
    refused(kind, path)
    path.rmdir()
    path.write_bytes(b"a: b\nc: \xe9\n")
    assert f"{path}:2: not UTF-8" in refused(kind, path)
    if kind in ("profile", "model", "sweep"):
        path.write_text("# x\n" * 600_000)
        assert "more than 2,000,000 bytes" in refused(kind, path)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "kind, text",
    [("profile", PROFILE), ("sweep", SWEEP), ("cases", CASES), ("measurements", CASES), ("split", SPLIT)],
)
def test_byte_order_marks_and_windows_line_ends_are_read(tmp_path, kind, text, mark, ends):
    path = tmp_path / "file.yaml"
    path.write_bytes((mark + text).replace("\n", ends).encode())
    read(kind, path)


@pytest.mark.parametrize(
    "kind, text, message",
    [
        ("measurements", "algorithm,a,a\nfa2,1,2\n", r":1: column 'a': comes 2 times"),
        ("measurements", "# c\nalgorithm,a\n\nfa2,1,2\n", r":4: 3 fields where the header has 2"),
        ("measurements", "algorithm,measured_time_us\n#\nfa2,fast\n", r":3: measured_time_us: 'fast' is no measured"),
        ("measurements", "algorithm,measured_hbm_read_bytes\nfa2,-1\n", r":2: measured_hbm_read_bytes: '-1'.*bytes"),
        ("measurements", "algorithm,measured_time_us\nfa2,inf\n", r":2: measured_time_us: 'inf'.*microseconds"),
        ("measurements", "a,b\n1,2\n", r":1: column 'algorithm': missing"),
        ("split", "family,side\na,jugde\n", r":2: side: 'jugde' of family 'a'; write calibrate or judge"),
        ("split", "family,side\na,judge\na,calibrate\n", r":3: family: 'a' is on both sides"),
        ("split", "family\na\n", r":1: column 'side': missing"),
        ("split", "family,side\n,judge\n", r":2: family: blank"),
        ("cases", 'a,b\n"1,2\n', r":2: not CSV"),
        ("profile", "base: h100_sxm\nnum_sms: {value: 1e30, kind: spec, source: s}", r":2: num_sms: 1e\+30 is outside"),
        ("profile", "base: h100_sxm\nhbm_latency_s: {value: 1e9, kind: spec, source: s}", r":2: hbm_latency_s: 1e\+09"),
        ("profile", f"name: {'x' * 1000}\nbase: h100_sxm", r":1: name: 1,000 letters; at most 300"),
        ("profile", 'title: "\\e[2J"\nbase: h100_sxm', r":1: title: a control character"),
        ("profile", "base: h100_smx", r":1: base: unknown GPU 'h100_smx'; did you mean 'h100_sxm'\?"),
        ("profile", PROFILE.replace("100", "!!int"), r":3: num_sms: "),
        ("profile", PROFILE + "calibration:\n  parameters:\n    x: !!float\n", r":6: calibration.parameters"),
        ("model", "name: !!int\ntitle: t\n", r":1: name: '' is wrong"),
        ("sweep", SWEEP.replace("512", "!!int"), r":6: problem.seqlen.to: not a single value"),
        ("sweep", SWEEP.replace("512", "inf"), r":6: problem.seqlen: 'inf' is not a number"),
        ("sweep", SWEEP.replace("steps: 2", "steps: 2, multiple: nan"), r":6: problem.seqlen: 'nan' is not a number"),
        ("sweep", SWEEP.replace("steps: 2", "steps: 1e12"), r":6: problem.seqlen.steps: .* at most 5,000,000"),
        ("sweep", SWEEP.replace("512", "1e12"), r":6: problem.seqlen: .* is more than 2,147,483,647"),
        ("sweep", SWEEP.replace("[fa2]", "[fa22]"), r":2: algorithms: .*'fa22' is unknown; did you mean 'fa2'\?"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, kind, text, message):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read(kind, path)
    assert "\n" not in str(caught.value)


SEEDS = {
    "profile": PROFILE + "calibration:\n  parameters:\n    x: {value: 1, unit: '1', low: 0, high: 2}\n",
    "model": "name: mine\ntitle: t\nlayers: 2\nhidden: 8\nheads: 2\nvocab: 9\ncausal: true\n",
    "sweep": SWEEP,
    "cases": CASES,
    "measurements": CASES,
    "split": SPLIT,
}
WORDS = [": ", ",", "\n", "nan", "inf", "-1", "1e999", "0x_", "&a ", "*a", "!!int ", "[", "]", "{", "}", '"', "\t", "~"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SEEDS)), st.integers(0, 2**32), st.integers(1, 4), st.binary(max_size=3))
def test_damaged_files_never_raise_anything_but_input_error(tmp_path, kind, seed, cuts, raw):
    """A valid file with pieces cut, repeated or replaced is read, or refused in one line."""
    chance, data = random.Random(seed), SEEDS[kind].encode()
    for _ in range(cuts):
        start = chance.randrange(len(data))
        end = start + chance.choice([0, 1, 3, 20])
        word = chance.choice([*(w.encode() for w in WORDS), raw, data[start:end] * 3, b""])
        data = data[:start] + word + data[end:] or b" "
    path = tmp_path / "file.yaml"
    path.write_bytes(data)
    try:
        read(kind, path)
    except InputError as error:
        assert "\n" not in str(error)


def test_terminal_codes_and_endless_words_of_a_file_are_not_echoed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text('base: "\\e[31m' + "x" * 100_000 + '"\n')
    error = failure(capsys, "gpus", "bad.yaml")
    assert "\x1b" not in error and len(error) < 3000


def test_measurements_without_usable_rows_leave_the_profile_alone(tmp_path, capsys):
    data, profile = tmp_path / "data.csv", tmp_path / "mine.yaml"
    data.write_text(CASES.replace("measured_time_us", "note"))
    profile.write_text(PROFILE)
    assert "no row that a stage can use" in failure(capsys, "calibrate", "--gpu", str(profile), "--data", str(data))
    assert profile.read_text() == PROFILE
    split = tmp_path / "split.csv"
    split.write_text(SPLIT)
    data.write_text(CASES.replace("family", "shape"))
    error = failure(capsys, "validate", "--gpu", "h100_sxm", "--data", str(data), "--split", str(split))
    assert "column 'family': missing" in error


def test_the_regime_of_a_row_that_cannot_be_read():
    assert regime({"seqlen_q": "many", "measured_time_us": "10"}) == "prefill <20us"
    assert regime({"seqlens": "16;4096", "measured_time_us": "300"}) == "prefill 0.2-5ms"


def test_sizes_beyond_any_kernel_are_refused_before_memory_is_used():
    gpu = load_profile("h100_sxm")
    with pytest.raises(InputError, match=r"seqlen_q: 1e\+12 is more than 2,147,483,647"):
        AttentionProblem(seqlen_q=10**12)
    with pytest.raises(InputError, match="softcap: nan is not a number from 0"):
        AttentionProblem(softcap=float("nan"))
    with pytest.raises(InputError, match=r"CTAs .*; up to 2,000,000 are simulated"):
        simulate("fa2", AttentionProblem(batch=10**8, seqlen_q=64, head_dim=64), gpu)


def test_devices_and_links_are_written_through(tmp_path):
    """Renaming a file onto ``/dev/stdout`` (or a pipe) would remove it."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target.txt", tmp_path / "link.txt"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through\n")
        assert os.read(end, 100) == b"through\n"
    finally:
        os.close(end)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    target.write_text("old\n")
    link.symlink_to(target)
    write_text(link, "new\n")
    assert link.is_symlink() and target.read_text() == "new\n"
    with pytest.raises(InputError, match="cannot be written"):
        write_text("/dev/full", "more\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("compare --gpu h100_smx", "h100_sxm"),
        ("compare --algorithm standrd", "standard"),
        ("compare --algorithm fa2:torch_flsh --gpu h100_sxm", "torch_flash"),
        ("compare --set l2_bites=x2", "l2_bytes"),
        ("compare --framework vlm", "vllm"),
        ("compare --dtype fp17", "fp16"),
        ("compare --dtype bfloat16", "bf16"),
        ("compare --algorithm FA2", "fa2"),
        ("compare --algorithm flash_attn_3", "fa3"),
        ("compare --gpu H200", "h200_sxm"),
        ("compare --gpu H100-SXM", "h100_sxm"),
        ("compare --pass backward", "bwd"),
        ("compare --timing kernle", "kernel"),
        ("validate --data rows.csv --side juge", "judge"),
        ("validate --data rows.csv --gpu h100_sxm --by algorthm", "algorithm"),
        ("require --parameters l2_bytes --target fa2.hmb<=1GB", "hbm"),
        ("compare --seqln 3", "--seqlen"),
        ("comapre", "compare"),
        ("dispatch --fact trainin=1", "training"),
        ("sensitivity --parameters l2_bites", "l2_bytes"),
        ("model gpt2-smal --gpu h100_sxm", "gpt2-small"),
        ("gpus key.yaml", "num_sms"),
        ("gpus base.yaml", "h100_sxm"),
        ("sweep section.yaml -o out.csv", "algorithms"),
        ("predict column.csv --gpu h100_sxm", "algoritm"),
    ],
)
def test_a_near_miss_of_every_kind_of_name_gets_a_suggestion(tmp_path, monkeypatch, capsys, arguments, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.yaml").write_text(PROFILE.replace("num_sms", "num_smss"))
    (tmp_path / "base.yaml").write_text(PROFILE.replace("h100_sxm", "h100_smx"))
    (tmp_path / "section.yaml").write_text(SWEEP.replace("algorithms", "algoritms"))
    (tmp_path / "rows.csv").write_text(CASES)
    (tmp_path / "column.csv").write_text(CASES.replace("algorithm", "algoritm"))
    # a target has spaces, which split the other arguments
    said = failure(capsys, *(a.replace(".", " ") if "<=" in a else a for a in arguments.split()))
    assert f"did you mean '{meant}'" in said or f"is it '{meant}'" in said or "Possible options: --seqlen" in said
