"""Result files: appended row by row, resumed, failures tried again."""

import csv

import pytest

from simulator.errors import InputError
from simulator.measure.cases import data_lines
from simulator.measure.results import ResultFile, format_cell

COLUMNS = ("case_id", "measured_time_us", "measured_error")


def rows_of(path):
    return list(csv.DictReader(data_lines(path)))


def test_a_row_is_on_disk_before_the_file_is_closed(tmp_path):
    results = ResultFile(tmp_path / "out.csv", COLUMNS, ["gpu: some"])
    results.append({"case_id": "a", "measured_time_us": 12.3456789})
    assert rows_of(tmp_path / "out.csv") == [{"case_id": "a", "measured_time_us": "12.3457", "measured_error": ""}]
    results.close()


def test_resuming_keeps_finished_rows_and_the_header_and_forgets_failed_ones(tmp_path):
    path = tmp_path / "out.csv"
    results = ResultFile(path, COLUMNS, ["gpu: some", "method: this"])
    results.append({"case_id": "a", "measured_time_us": 1.0})
    results.append({"case_id": "b", "measured_error": "out of memory"})
    results.close()
    again = ResultFile(path, COLUMNS, ["gpu: other"])
    assert again.done == {"a"}
    again.append({"case_id": "b", "measured_time_us": 2.0})
    again.close()
    assert [(row["case_id"], row["measured_error"]) for row in rows_of(path)] == [("a", ""), ("b", "")]
    assert path.read_text().startswith("# gpu: some\n# method: this\ncase_id,")


def test_a_file_with_other_columns_is_not_touched(tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("something,else\n1,2\n")
    with pytest.raises(InputError, match="other columns"):
        ResultFile(path, COLUMNS, [])
    assert path.read_text() == "something,else\n1,2\n"


def test_cells_never_break_a_line_or_start_a_comment():
    assert format_cell("a\nb # c") == "a b no. c"
    assert format_cell(None) == ""
    assert format_cell(True) == "True"
