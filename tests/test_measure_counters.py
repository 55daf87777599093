"""The profiler's output: parsed, cut into cases by the marker launches, summed."""

import pytest

from simulator.errors import InputError
from simulator.measure.cases import Case
from simulator.measure.counters import number, parse_ncu_csv, read_failures, split_by_case, summarise

CASES = [Case("first", "f", "fa2", "torch_flash"), Case("second", "f", "fa3", "flash_attn_3")]
HEADER = (
    '"ID","Kernel Name","Block Size","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum",'
    '"gpu__time_duration.sum",'
    '"lts__t_sectors_srcunit_tex_op_read.sum","lts__t_sectors_srcunit_tex_op_write.sum","sm__cycles_elapsed.max",'
    '"sm__cycles_elapsed.avg.per_second"'
)
UNITS = '"","","","","byte","byte","ns","sector","sector","cycle","cycle/second"'


def launch(index, name, grid, *values):
    return f'"{index}","{name}","(128, 1, 1)","({grid}, 1, 1)",' + ",".join(f'"{value}"' for value in values)


def output():
    return [
        "==PROF== Connected to process 7",
        HEADER,
        UNITS,
        launch(0, "iosim_empty", 1, 0, 0, 900, 0, 0, 10, "1,000,000,000"),
        launch(1, "flash_fwd", 64, "1,000", 200, 5000, 10, 4, 8000, "1,600,000,000"),
        launch(2, "combine", 8, 50, 10, 1000, 2, 1, 2000, "2,000,000,000"),
        launch(3, "iosim_empty", 2, 0, 0, 900, 0, 0, 10, "1,000,000,000"),
        launch(4, "fa3", 132, 7, 8, 9, 1, 1, 900, "1,500,000,000"),
        "==PROF== Disconnected",
    ]


def test_launches_go_to_the_case_whose_marker_came_before():
    found = split_by_case(parse_ncu_csv(output()), CASES)
    assert {case: [row["Kernel Name"] for row in rows] for case, rows in found.items()} == {
        "first": ["flash_fwd", "combine"],
        "second": ["fa3"],
    }


def test_sums_are_bytes_of_32_byte_sectors_and_the_clock_weighs_time():
    total = summarise(split_by_case(parse_ncu_csv(output()), CASES)["first"])
    assert total["measured_hbm_read_bytes"] == 1050
    assert total["measured_hbm_write_bytes"] == 210
    assert total["measured_l2_read_bytes"] == 12 * 32
    assert total["measured_l2_write_bytes"] == 5 * 32
    assert total["measured_kernel_time_us"] == pytest.approx(6.0)
    assert total["measured_cycles"] == 10000
    assert total["measured_launches"] == 2
    # 8000 cycles at 1.6 GHz and 2000 at 2.0 GHz take 6 µs together
    assert total["measured_sm_clock_mhz"] == pytest.approx(10000 / 6.0)


def test_a_metric_that_was_not_collected_stays_empty_instead_of_zero():
    rows = split_by_case(parse_ncu_csv([line.replace('"1,000"', '"n/a"') for line in output()]), CASES)["first"]
    assert summarise(rows)["measured_hbm_read_bytes"] is None
    assert summarise(rows)["measured_hbm_write_bytes"] == 210


def test_a_marker_without_a_case_is_an_error():
    with pytest.raises(InputError, match="marker 2"):
        split_by_case(parse_ncu_csv(output()), CASES[:1])


def test_no_table_is_an_error_that_points_to_the_log():
    with pytest.raises(InputError, match="no table"):
        parse_ncu_csv(["==ERROR== ERR_NVGPUCTRPERM"])


def test_numbers_of_the_profiler():
    assert [number(text) for text in ("1,234.5", "7", "n/a", "")] == [1234.5, 7.0, None, None]


def test_failures_of_the_target_are_read_back(tmp_path):
    (tmp_path / "errors").write_text("first\tRuntimeError: no\n")
    assert read_failures(str(tmp_path / "errors")) == {"first": "RuntimeError: no"}
    assert read_failures(str(tmp_path / "nothing")) == {}
