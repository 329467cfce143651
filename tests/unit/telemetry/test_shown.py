"""What strangers wrote reaches no terminal as a code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.telemetry.output import escaped

EVIL = "\x1b]52;c;RVZJTA==\x07\x9b5n\x1bP1$r\x1b\\\u202e"


@pytest.mark.parametrize(
    "text", ["plain\ttext\r\n", "\x1b[1;31mred\x1b[0m", "\x1b[2K\x1b[1A\x1b[?25l"]
)
def test_text_and_our_own_codes_stay(text: str):
    assert escaped(text) == text


@pytest.mark.parametrize("code", EVIL)
def test_codes_become_escapes(code: str):
    assert escaped(code) == (code if code.isprintable() else json.dumps(code)[1:-1])


def test_json_stays_json():
    page = json.dumps({"name": EVIL}, ensure_ascii=False)
    assert json.loads(escaped(page)) == {"name": EVIL}


def test_a_row_that_a_command_shows(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": EVIL}], "data_source": "x"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "luyen", "data", "inspect", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, env=os.environ, check=False, timeout=120)
    said = done.stdout.decode()
    assert "RVZJTA" in said
    assert not set(said) & set("\x1b\x07\x9b\u202e")
