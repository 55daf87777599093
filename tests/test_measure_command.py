"""The command without a GPU: lists, refuses politely, imports nothing heavy; the CUDA sources are complete."""

import subprocess
import sys

import pytest
from command_line import failure

from simulator.cli import main
from simulator.measure import cuda_sources, kernels
from simulator.measure.case_list import all_cases


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "need_cuda", lambda: "PyTorch sees no CUDA GPU")


def test_list_names_every_kernel_and_a_reason(capsys, monkeypatch):
    for kernel in kernels.KERNELS.values():
        monkeypatch.setattr(kernels, "KERNELS", {**kernels.KERNELS, kernel.name: kernel})
    assert main(["measure", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for name in kernels.KERNELS:
        (line,) = [line for line in shown if line.startswith(name + " ")]
        assert "runs here" in line or "cannot run here: " in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--microbench", "-o", "x.csv"), "nothing can be measured here"),
        (("--counters", "--spans"), "choose one"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(capsys, arguments, says):
    assert says in failure(capsys, "measure", *arguments)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, simulator.measure.command, simulator.measure.kernels, simulator.measure.counters, "
        "simulator.measure.microbench, simulator.measure.fa1_triton; "
        "print([m for m in ('torch', 'triton', 'pynvml', 'flash_attn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_case_of_the_list_is_one_its_kernel_takes():
    for case in all_cases():
        assert kernels.kernel_of(case).refuse(case) is None, case.case_id


def test_unknown_implementation_names_the_known_ones():
    case = all_cases()[0]
    with pytest.raises(ValueError, match="known: torch_flash"):
        kernels.kernel_of(type(case)(**{**case.__dict__, "implementation": "fastest"}))


def test_generated_cuda_sources_have_no_placeholder_left():
    sources = [cuda_sources.pipe_source(name) for name in cuda_sources.PIPE_BODIES]
    sources += [cuda_sources.mma_source(8, 1, 2), cuda_sources.mix_source(3, 1)]
    sources += [cuda_sources.wgmma_source(columns) for columns in (64, 256)]
    for source in sources:
        for placeholder in (
            "BODY",
            "INNER",
            "MMA_WARPS",
            "EXP_RATIO",
            "READS",
            "WRITES",
            "REGISTERS",
            "OUTPUTS",
            "{N}",
        ):
            assert "{" + placeholder.strip("{}") + "}" not in source
        assert source.count("{") == source.count("}")


def test_a_wgmma_of_n_columns_names_n_halves_of_accumulators():
    source = cuda_sources.wgmma_source(64)
    assert '"+f"(c[31])' in source and '"+f"(c[32])' not in source
    assert "%32, %33, 1, 1, 1, 0, 0" in source
