"""The rows of metrics.jsonl."""

import json
from pathlib import Path

import pytest

from train.metrics import keep_rows, read_rows


def test_rows_beyond_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert keep_rows(file, 3) == 0
    rows = [{"step": s, "kind": "train"} for s in (1, 2, 3, 4)] + [{"step": 3, "kind": "eval"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text + '{"step": 5, "ki')
    assert keep_rows(file, 3) == 4
    assert [row["step"] for row in read_rows(file)] == [1, 2, 3, 3]
    file.write_text("nonsense\n" + text)
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        keep_rows(file, 3)
