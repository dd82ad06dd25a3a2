from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agentrl import codec
from agentrl.telemetry.json_lines import JsonLines, read_json_lines
from agentrl.types.errors import StorageError

ROWS = [{"step": 1, "loss": 0.5}, {"step": 2, "name": "kö\\"}, {}]


def written(file: Path) -> bytes:
    lines = JsonLines(file)
    for row in ROWS:
        lines.append(json.dumps(row))
    lines.close()
    return file.read_bytes()


def test_lines_are_read_as_they_were_written_and_any_tool_reads_them(tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl")
    assert read_json_lines(tmp_path / "a.jsonl") == ROWS
    plain = [json.loads(line) for line in data.splitlines()]
    assert [{name: row[name] for name in row if name != "checksum"} for row in plain] == ROWS


def test_no_byte_of_a_line_can_be_another_without_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    data, draw = written(file), random.Random(0)
    for place in range(len(data)):
        changed = bytes([data[place] ^ draw.randint(1, 255)])
        file.write_bytes(data[:place] + changed + data[place + 1 :])
        with pytest.raises(StorageError, match=rf"{file} is damaged in line \d: .*restore the file from a copy"):
            read_json_lines(file)


def test_a_line_that_a_crash_cut_off_is_left_out_and_taken_out_when_the_file_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    data = written(file)
    first_bytes = data.index(b"\n") + 1
    second_bytes = data.index(b"\n", first_bytes)
    for kept in range(first_bytes + 1, second_bytes):
        file.write_bytes(data[:kept])
        assert read_json_lines(file) == ROWS[:1]
        caplog.clear()
        JsonLines(file).close()
        assert file.read_bytes() == data[:first_bytes]
        assert [record.getMessage() for record in caplog.records] == [
            f"{file}: its last {kept - first_bytes} bytes, a line that a crash cut off, are taken out"
        ]


def test_a_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(written(file)[:-1])
    assert read_json_lines(file) == ROWS
    JsonLines(file).close()
    assert read_json_lines(file) == ROWS


def test_a_file_of_an_older_program_is_read_but_for_lines_that_a_crash_cut_off_which_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a{"step": 2, "a": 0.7}\n{"step": 3, "a": 0.9}\n')
    assert [row["step"] for row in read_json_lines(file)] == [1, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: line 2 is no JSON and is left out; take it out of the file, or restore that"
    ]
    lines = JsonLines(file)
    lines.append('{"step": 4}')
    lines.close()
    assert [row["step"] for row in read_json_lines(file)] == [1, 3, 4]


def test_what_was_sealed_is_unsealed_to_the_byte() -> None:
    for text in (b"{}", b'{"a":1}', b'{"a": {"b": [1, 2]}}'):
        assert codec.unseal(codec.seal(text)) == text
        assert codec.unseal(text) == text
