"""Packed answers: the rows of the JSONL exactly, the same samples, and clear errors."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.text_rigs import END, small_tokenizer
from train.chat import ChatFormat
from train.conversations import ConversationFileError, is_held_out
from train.data import load_samples
from train.packed import FORM, PackedFileError, is_packed, pack, read_packed

CHAT = ChatFormat(small_tokenizer(), None, (END,))


def answers(count: int = 12, **changes) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        messages = [{"role": "user", "content": f"what is {i}?"}]
        hot = i % 3 == 0
        rows.append(
            {
                "id": f"é{i}",
                "prompt_ids": CHAT.prompt_ids(messages),
                "response_ids": rng.integers(3, 110, int(rng.integers(2, 9))).tolist(),
                "finish_reason": "stop" if i % 2 else "length",
                "temperature": 0.8 if hot else 0.0,
                "top_k": 0,
                "top_p": 0.95 if hot else 1.0,
                "seed": 2**32 - 1 - i,
                "max_new_tokens": 8,
                "messages": messages,
                "target": "tiny",
                **changes,
            }
        )
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def meta(**fields) -> np.ndarray:
    return np.frombuffer(json.dumps({"form": FORM, **fields}).encode(), np.uint8)


def load(path: Path, chat: ChatFormat | None = CHAT, **options):
    return load_samples(path, chat, **{"max_length": 64, "vocab_size": 128, **options})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = write(tmp_path / "rows.jsonl", answers())
    pack([source], tmp_path / "rows.npz", CHAT)
    return source, tmp_path / "rows.npz"


def test_sides_of_the_split(tmp_path: Path) -> None:
    """A file of each side; together all rows, and training on both finds no common prompt."""
    source, split = write(tmp_path / "rows.jsonl", answers()), []
    for held_out in (False, True):
        pack([source], tmp_path / f"{held_out}.npz", CHAT, 0.4, held_out)
        split.append(read_packed(tmp_path / f"{held_out}.npz"))
        assert {is_held_out(row["split_key"], 0.4) for row in split[-1].rows()} == {held_out}
    assert sorted(split[0].record_ids + split[1].record_ids) == sorted(
        row["id"] for row in answers()
    )
    with pytest.raises(PackedFileError, match=r"no rows to pack \(held out, .* 1e-09\)"):
        pack([source], tmp_path / "none.npz", CHAT, 1e-9, True)
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("top", [109, 70_000])
def test_round_trip(tmp_path: Path, top: int) -> None:
    rows = answers()
    rows[3]["response_ids"] = [top, 0, top]
    split = [write(tmp_path / "a.jsonl", rows[:5]), write(tmp_path / "b.jsonl", rows[5:])]
    count, tokens = pack(split, tmp_path / "x.npz")
    assert (count, tokens) == (12, sum(len(row["response_ids"]) for row in rows))
    packed = read_packed(tmp_path / "x.npz")
    assert packed.arrays["ids"].dtype == (np.uint16 if top < 2**16 else np.uint32)
    back = list(packed.rows())
    keys = [row.pop("split_key") for row in back]
    assert len(set(keys)) == 12
    for row in rows:
        del row["messages"]
    assert back == rows
    assert {type(i) for i in back[0]["prompt_ids"]} == {int}
    assert is_packed(tmp_path / "x.npz")
    assert not is_packed(split[0])


@pytest.mark.parametrize("held_out", [False, True])
def test_the_samples_are_those_of_the_jsonl(files: tuple[Path, Path], held_out: bool) -> None:
    options = {"target_name": "tiny", "held_out_fraction": 0.4, "held_out": held_out}
    (one, report), (two, packed_report) = (load(file, **options) for file in files)
    assert 0 < len(one) < 12
    assert one.ids == two.ids
    assert one.checksum() == two.checksum()
    assert one.prompt_keys.tolist() == two.prompt_keys.tolist()
    assert report == packed_report


def test_another_target_or_template_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    packed = files[1]
    with pytest.raises(ValueError, match=r"'tiny'.*'qwen'"):
        load(packed, target_name="qwen")
    thinking = ChatFormat(CHAT.tokenizer, False, (END,))
    with pytest.raises(PackedFileError, match=r"rows\.npz.*enable_thinking=False"):
        load(packed, thinking)
    with pytest.raises(ConversationFileError, match=r"rows\.jsonl: row 0.*another chat template"):
        pack([files[0]], tmp_path / "no.npz", thinking)
    assert not (tmp_path / "no.npz").exists()
    load(packed, None)  # ids only: nothing is compared


def test_an_unknown_template_is_reported(files: tuple[Path, Path], tmp_path: Path) -> None:
    pack([files[0]], tmp_path / "plain.npz")
    _, report = load(tmp_path / "plain.npz")
    assert f"{tmp_path / 'plain.npz'}: prompts of ids only, their template unknown" in str(report)
    assert "template unknown" not in str(load(files[1])[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 3}, r"b\.jsonl: row 0: target 3, before it 'tiny'"),
        ({"finish_reason": "cut"}, "row 0: finish_reason 'cut'"),
        ({"response_ids": [1, -1]}, "row 0: response_ids is not a list of ids"),
        ({"messages": []}, "row 0: no messages"),
        ({"messages": "hi"}, "row 0: messages is not a list: 'hi'"),
        ({"messages": ["hi"]}, "row 0: no message with role and text: 'hi'"),
        ({"messages": [{"role": "user", "content": None}]}, "row 0: no message with role and text"),
        ({"prompt_ids": 5}, "row 0: prompt_ids is not a list of ids: 5"),
        ({"prompt_ids": [2**40]}, "row 0: prompt_ids is not a list of ids"),
        ({"response_ids": [True, 2]}, "row 0: response_ids is not a list of ids"),
        ({"seed": -1}, r"row 0: seed -1 is not in 0\.\.4294967295"),
        ({"seed": None}, "row 0: seed None is not in"),
        ({"temperature": "a"}, "row 0: temperature 'a' is not a number of at least 0"),
        ({"temperature": math.nan}, "row 0: temperature nan is not a number"),
    ],
)
def test_rows_that_cannot_be_packed(tmp_path: Path, changes: dict, message: str) -> None:
    good = write(tmp_path / "a.jsonl", answers(2))
    bad = write(tmp_path / "b.jsonl", answers(2, **changes))
    with pytest.raises(ConversationFileError, match=message):
        pack([good, bad], tmp_path / "x.npz", CHAT)
    if "row 0: no messages" not in message and "before it" not in message:
        with pytest.raises(ConversationFileError, match=message):
            load(bad)
    with pytest.raises(PackedFileError, match=r"row 0 is no regenerated row: it has no id, prompt"):
        pack([write(tmp_path / "c.jsonl", [{"messages": []}])], tmp_path / "x.npz")


def test_no_input_is_written_over(files: tuple[Path, Path], tmp_path: Path) -> None:
    before = files[0].read_bytes()
    with pytest.raises(PackedFileError, match=r"rows\.jsonl: is both to be read and to be written"):
        pack([files[0]], files[0])
    assert files[0].read_bytes() == before
    with pytest.raises(PackedFileError, match=r"rows\.npz: is packed already"):
        pack([files[1]], tmp_path / "again.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PackedFileError, match="folder: a folder, not a file to write"):
        pack([files[0]], tmp_path / "folder")
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole, broken = files[1].read_bytes(), tmp_path / "broken.npz"
    flipped = bytearray(whole)
    flipped[60] ^= 0xFF  # inside the first array
    for content in (whole[: len(whole) // 2], whole[:-1], bytes(flipped), b"PK nonsense", b"PK"):
        broken.write_bytes(content)
        with pytest.raises(PackedFileError, match=r"broken\.npz: cannot be read as packed"):
            load(broken)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", np.zeros(3, np.uint16), "ids has 3 entries, the lengths sum to"),
        ("ids", np.zeros(3, np.int64), r"ids is int64 \(3,\)"),
        ("seeds", np.zeros(3, np.uint32), "seeds has 3 rows, record_ids 12"),
        ("settings", np.full(12, 9, np.uint16), "settings has the index 9, meta has 2"),
        ("meta", np.frombuffer(b"{}", np.uint8), "meta is not of the form"),
        ("meta", meta(), "meta has no target or no template"),
        ("meta", meta(target="t", template=None, settings={}), "settings are not a list"),
        ("meta", meta(target="t", template=None, settings=[5]), "settings are not a list"),
        ("meta", np.frombuffer(b"{", np.uint8), "cannot be read as packed answers"),
        ("stopped", np.array([object()]), "cannot be read as packed answers.*allow_pickle"),
        ("seeds", None, "cannot be read as packed answers.*seeds"),
    ],
)
def test_files_that_do_not_fit_themselves(
    files: tuple[Path, Path], tmp_path: Path, name: str, value: np.ndarray | None, message: str
) -> None:
    arrays = dict(np.load(files[1]))
    arrays[name] = value
    if value is None:
        del arrays[name]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(PackedFileError, match=r"(?s)other\.npz: .*" + message):
        read_packed(tmp_path / "other.npz")


def test_the_command(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "cli.npz"
    command = [sys.executable, "scripts/pack_answers.py", f"--out={out}"]
    done = subprocess.run([*command, files[0]], capture_output=True, text=True, check=True)
    assert "12 rows" in done.stdout
    assert "template not recorded" in done.stdout
    assert len(read_packed(out)) == 12
    bad = subprocess.run([*command, tmp_path / "none.jsonl"], capture_output=True, text=True)
    assert bad.returncode == 1
    assert "error: " in bad.stderr
    assert "none.jsonl" in bad.stderr
