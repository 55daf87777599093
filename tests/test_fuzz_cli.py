"""Any command with any flags: an answer or one line; never a traceback, never a file that nobody named."""

import contextlib
import io
import os
import tempfile

import pytest
import typer
from hypothesis import example, given, note
from hypothesis import strategies as st
from law_settings import laws

from simulator.cli import COMMANDS, app, main

SMALL = ["--batch", "1", "--heads", "2", "--seqlen", "64", "--head-dim", "64"]
ONE = ["--gpu", "h100_sxm", "--algorithm", "fa2", *SMALL]
#: Arguments with which a command answers quickly; the random flags come after them, and the last of a kind counts.
CALLS = {
    "compare": ["-j", "1", *ONE],
    "why": ["fa2", "standard", "--gpu", "h100_sxm", *SMALL],
    "dispatch": ["--gpu", "h100_sxm", *SMALL],
    "explain": ["--time-us", "9", *ONE],
    "predict": ["cases.csv", "--gpu", "h100_sxm", "-j", "1"],
    "gpus": [],
    "io": ONE,
    "timeline": ["--algorithm", "fa2", "--gpu", "h100_sxm", *SMALL],
    "roofline": ONE,
    "scale": ["--lengths", "64,128", *ONE],
    "report": ["-o", "page.html", "--timelines", "fa2", "--validation-rows", "1", *ONE],
    "model": ["gpt2-small", "--gpu", "h100_sxm", "--batch", "1", "--seqlen", "64"],
    "sweep": ["spec.yaml", "-o", "swept.csv", "-j", "1"],
    "sensitivity": ["--parameters", "l2_bytes", *ONE],
    "require": ["--target", "fa2 <= 1ms", "--parameters", "hbm_bandwidth", "--gpu", "h100_sxm", *SMALL],
    "measure": ["--list"],
    "calibrate": ["--dry-run", "--gpu", "h100_sxm", "--data", "cases.csv"],
    "validate": ["--gpu", "h100_sxm", "--data", "cases.csv", "--jobs", "1"],
}
FILES = {
    "cases.csv": "algorithm,batch,heads,seqlen_q,head_dim,family,measured_time_us\nfa2,1,2,64,64,a,10\n",
    "spec.yaml": "gpu: h100_sxm\nalgorithms: [fa2]\nhardware: {l2_bytes: [x2]}\nproblem: {seqlen: [64], heads: [1]}\n",
    "gpu.yaml": "name: mine\nbase: h100_sxm\nnum_sms: {value: 100, kind: assumed, source: me}\n",
    "bad.yaml": "name: [\n",
    "bytes.csv": "algorithm,\udcff\n",
}
# no number between a few hundred and beyond all limits: a valid problem of any size would only be slow
TEXT = """
0 -1 1 2 3 64 100 1.5 -0.0 nan inf -inf 1e-300 1e300 1e999 999999999999999999999 0x10 1_0 ٣ true none auto fa1
fa2 fa3 fa9 standard flash_decoding fa2:torch_flash fa3:x : fa2,fa2 fa2,fa3 torch torch:2.11 vllm flash_attn
h100_sxm h100_smx a100_sxm4_80gb b200 gpu.yaml bad.yaml nowhere.yaml cases.csv bytes.csv spec.yaml . .. / fwd
bwd fwd_bwd fp16 bf16 fp8 cold warm kernel graph eager gpt2 gpt2-small llama-3-8b l2_bytes=x2 l2_bytes=-1 l2_bytes=nan
l2_bites=x2 hbm_bandwidth=8TB/s hbm_bandwidth=8parsec l2_bytes num_sms=0 num_sms=x1e9 = =1 a=b=c x2 % %s {} {0}
[red] [/] [/red]x [link=http://a]b 64;128 64,0 1:2:3 64..128 128x64 128x64x2 64x 1/2 out.csv out.json out.png
out.svg out.html out.doc no/where/out.csv /dev/null /dev/full --help -- - tree local h100_sxm,h200_sxm
"""
WORDS = TEXT.split()
VALUES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(
        ["", " ", "\n", "\t", "a b", "\x00", "\x1b[31m", "\udcff", "é", "🙂", "'", '"', "\\", "<script>", "fa2 <= "]
    ),
    st.text(max_size=3),
)


def options(command: str) -> list[str]:
    """The options of ``command`` as it lists them itself."""
    found = typer.main.get_command(app).get_command(None, command)
    return sorted(
        {name for p in found.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    )


#: Options that start processes, or as much work as they say.
SLOW = {"-j", "--jobs", "--scheduler", "--kernels", "--published"}


@st.composite
def calls(draw, command: str):
    """``command`` with up to three random flags."""
    arguments = [command, *CALLS[command]]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([o for o in options(command) if o not in SLOW] + ["--nonsense"]))
        arguments += [name, draw(VALUES)] if draw(st.integers(0, 9)) else [name]
    return arguments


def test_every_command_is_tried():
    assert set(CALLS) == {name for name, _, _ in COMMANDS}


@pytest.mark.parametrize("command", CALLS)
def test_any_flags_give_an_answer_or_one_line(command):
    @laws(12)
    @given(calls(command))
    @example([command, *CALLS[command]])
    def check(arguments):
        note(f"iosim {arguments}")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name, text in FILES.items():
                with open(name, "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
            out, error = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                code = main(arguments)
            error.flush()
            said = error.buffer.getvalue().decode()
            assert code in (0, 1, 2), said
            if arguments == [command, *CALLS[command]]:
                # what random flags are added to works; no stage is fitted to the one row of a calibration
                assert code == (2 if command == "calibrate" else 0), said
            assert "Traceback" not in said
            if code == 2:
                assert said.strip() and len(said.splitlines()) == 1, said
            made = {os.path.join(at, name) for at, _, names in os.walk(".") for name in names}
            made = {os.path.relpath(name) for name in made} - set(FILES)
            # a file that was named or is named after its command, or the table beside a picture
            named = {a.rpartition(".")[0] or a for a in arguments} | {a for a in arguments} | {"swept"}
            assert all(n in named or n.partition(".")[0] in named or n.startswith(f"{command}-") for n in made), made

    check()
