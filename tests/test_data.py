"""Rows to batches: reports, regenerated rows, order, shards, resume, padding, synthetic data."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from train.chat import ChatFormat, Sample, sample_from_ids
from train.conversations import BrokenFileWarning, ConversationFileError
from train.data import load_samples, make_loader, num_batches
from train.store import TokenStore, check_disjoint

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = """\
{%- for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}
  {{- '<s>assistant:' + ('!' if enable_thinking else '') }}
{%- endif %}"""


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    """One id a byte: lengths are easy to count."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ChatFormat(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=TEMPLATE,
            clean_up_tokenization_spaces=False,
        )
    )


def row(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def load(path, chat, **options):
    return load_samples(path, chat, **{"max_length": 64, "vocab_size": 258, **options})


class TestLoading:
    def test_every_row_is_accounted_for(self, tmp_path, chat):
        """pitfalls.md: counts of dropped rows are reported."""
        rows = [
            row("hi", "hello"),
            row("hi", "hello"),  # duplicate
            row("hi", ""),  # nothing to learn
            row("hi", "x" * 100),  # cut
            row("y" * 100, "no room"),
            row(
                "z" * 39, "last token only"
            ),  # a prompt of 57: 39 + 5 "user:" + 10 "assistant:" + 3
            {"messages": [{"role": "judge", "content": "x"}]},
            row("a", "b", "c", "d"),
        ]
        store, report = load(write(tmp_path / "rows.jsonl", rows), chat, max_length=58)
        assert report.rows == 8 == report.kept + report.unusable.total()
        assert report.kept == len(store) == 3
        assert dict(report.unusable) == {
            "duplicate": 1,
            "no assistant turn with text": 1,
            "the prompt fills max_length": 1,
            "no anchor: no two supervised tokens in a row within max_length": 1,
            "unknown role 'judge'": 1,
        }
        assert report.truncated == 1
        assert report.tokens == store.lengths.sum()
        assert report.supervised_tokens == sum(int(store[i]["loss_mask"].sum()) for i in range(3))
        for part in ("3 of 8 rows kept", "left out, duplicate: 1", "cut at max_length: 1"):
            assert part in str(report)
        assert store.ids == ["0", "3", "7"]

    def test_rows_without_a_valid_anchor_are_dropped(self, tmp_path, chat):
        """An anchor p needs p and p + 1 supervised: one supervised token is none."""
        rows = [row("q", "abcdef"), row("q2", "abcdef")]
        prompt = len(chat.prompt_ids(rows[0]["messages"][:1]))
        path = write(tmp_path / "rows.jsonl", rows)
        store, report = load(path, chat, max_length=prompt + 2)
        assert store.ids == ["0"]
        assert report.unusable.total() == 1
        assert store[0]["loss_mask"].sum() == 2

    def test_truncated_rows_end_without_end_of_sequence(self, tmp_path, chat):
        store, _ = load(write(tmp_path / "r.jsonl", [row("q", "x" * 99)]), chat, max_length=40)
        eos = chat.tokenizer.convert_tokens_to_ids("</s>")
        assert len(store[0]["tokens"]) == 40
        assert store[0]["tokens"][-1] != eos

    def test_held_out_sides_are_disjoint_and_complete(self, tmp_path, chat):
        rows = [row(f"q{i}", f"a{i % 3}") for i in range(60)] + [row("q7", "other answer")]
        path = write(tmp_path / "rows.jsonl", rows)
        train, train_report = load(path, chat, held_out_fraction=0.3)
        held, held_report = load(path, chat, held_out_fraction=0.3, held_out=True)
        assert sorted(train.ids + held.ids, key=int) == [str(i) for i in range(61)]
        assert ("7" in train.ids) == ("60" in train.ids)  # the same first user message
        assert train_report.kept == held_report.unusable["other side of the held-out split"]

    def test_limit(self, tmp_path, chat):
        path = write(tmp_path / "rows.jsonl", [row(f"q{i}", "a") for i in range(20)])
        store, report = load(path, chat, limit=7)
        assert len(store) == report.kept == report.rows == 7

    def test_no_usable_row_is_an_error_with_the_counts(self, tmp_path, chat):
        path = write(tmp_path / "rows.jsonl", [row("q", "")] * 3)
        with pytest.raises(ValueError, match=r"no usable row in(.|\n)*no assistant turn .*: 3"):
            load(path, chat)

    def test_broken_files(self, tmp_path, chat):
        path = tmp_path / "cut.json"
        path.write_text(json.dumps([row("q", "a"), row("r", "b")])[:-9])
        with pytest.raises(ConversationFileError, match="cut off"):
            load(path, chat)
        with pytest.warns(BrokenFileWarning):
            store, report = load(path, chat, on_truncation="keep")
        assert len(store) == 1
        assert "Kept the 1 good records" in str(report)

    def test_ids_beyond_the_vocabulary(self, tmp_path, chat):
        path = write(tmp_path / "rows.jsonl", [row("q", "a")])
        with pytest.raises(ValueError, match=r"row 0 .*\.\.257, the target's vocab_size is 257"):
            load(path, chat, vocab_size=257)

    def test_conversations_need_a_tokenizer(self, tmp_path):
        with pytest.raises(ValueError, match="need a tokenizer"):
            load(write(tmp_path / "rows.jsonl", [row("q", "a")]), None)

    def test_checksum_follows_the_data(self):
        def checksum(tokens, mask):
            return TokenStore([Sample("x", np.array(tokens, np.int32), np.array(mask))]).checksum()

        base = checksum([1, 2, 3], [False, True, True])
        assert base == checksum([1, 2, 3], [False, True, True])
        assert base != checksum([1, 2, 4], [False, True, True])
        assert base != checksum([1, 2, 3], [True, True, True])


class TestRegeneratedRows:
    def regenerated(self, chat, messages, response, **changes) -> dict:
        ids = chat.tokenizer.encode(response, add_special_tokens=False)
        made = {
            "id": "r",
            "prompt_ids": chat.prompt_ids(messages),
            "response_ids": ids,
            "finish_reason": "stop",
            "temperature": 0.0,
            "seed": 0,
            "messages": messages,
            "target": "tiny",
        }
        return {**made, **changes}

    def test_ids_are_used_verbatim(self, tmp_path, chat):
        messages = row("hi")["messages"]
        rows = [
            self.regenerated(chat, messages, "hello</s>", id="stopped"),
            self.regenerated(chat, messages, "hel", id="cut", finish_reason="length"),
            row("plain", "conversation"),
        ]
        store, report = load(write(tmp_path / "r.jsonl", rows), chat, target_name="tiny")
        assert store.ids == ["stopped", "cut", "2"]
        assert report.regenerated == 2
        for i in range(2):
            prompt, response = rows[i]["prompt_ids"], rows[i]["response_ids"]
            assert store[i]["tokens"].tolist() == prompt + response
            assert store[i]["loss_mask"].tolist() == [False] * len(prompt) + [True] * len(response)

    def test_same_ids_as_the_rendered_conversation(self, tmp_path, chat):
        made = self.regenerated(chat, row("hi")["messages"], "hello</s>")
        store, _ = load(write(tmp_path / "r.jsonl", [made, row("hi", "hello")]), chat)
        assert store[0]["tokens"].tolist() == store[1]["tokens"].tolist()
        assert store[0]["loss_mask"].tolist() == store[1]["loss_mask"].tolist()

    def test_same_side_of_the_split_as_its_conversation(self, tmp_path, chat):
        plain = [row(f"q{i}", "a") for i in range(40)]
        made = [
            self.regenerated(chat, r["messages"][:1], "b</s>", id=i) for i, r in enumerate(plain)
        ]
        one = load(write(tmp_path / "plain.jsonl", plain), chat, held_out_fraction=0.4)[0]
        two = load(write(tmp_path / "made.jsonl", made), chat, held_out_fraction=0.4)[0]
        assert one.ids == two.ids
        assert 0 < len(one) < 40

    def test_another_thinking_mode_is_an_error(self, tmp_path, chat):
        thinking = ChatFormat(chat.tokenizer, enable_thinking=True)
        made = self.regenerated(thinking, row("hi")["messages"], "hello</s>")
        path = write(tmp_path / "r.jsonl", [made])
        assert len(load(path, thinking)[0]) == 1
        with pytest.raises(ValueError, match=r"r\.jsonl: row 0.*thinking mode"):
            load(path, chat)

    def test_another_target_is_an_error(self, tmp_path, chat):
        path = write(tmp_path / "r.jsonl", [self.regenerated(chat, row("hi")["messages"], "x</s>")])
        with pytest.raises(ValueError, match=r"'tiny'.*'qwen'"):
            load(path, chat, target_name="qwen")

    def test_ids_only_need_no_tokenizer(self, tmp_path):
        rows = [
            {"id": "a", "prompt_ids": [3, 4], "response_ids": [5, 6, 7]},
            {"id": "b", "prompt_ids": [3, 4], "response_ids": [5]},
            {"id": "c", "prompt_ids": [3, 4], "response_ids": []},
        ]
        store, report = load(write(tmp_path / "r.jsonl", rows), None)
        assert store.ids == ["a"]
        assert report.unusable.total() == 2
        rows[0]["response_ids"] = [5, "6"]
        with pytest.raises(ValueError, match="row 0: response_ids is not a list of ids"):
            load(write(tmp_path / "bad.jsonl", rows), None)


class TestEvaluationRows:
    """A prompt that is trained on must not be evaluated on."""

    def stores(self, tmp_path, chat, train, held_out) -> tuple[TokenStore, TokenStore]:
        pair = (("train.jsonl", train), ("eval.jsonl", held_out))
        made = [load(write(tmp_path / name, rows), chat)[0] for name, rows in pair]
        return made[0], made[1]

    def test_other_prompts_are_fine(self, tmp_path, chat):
        pair = self.stores(tmp_path, chat, [row("q", "ab"), row("r", "ab")], [row("s", "ab")])
        check_disjoint(*pair)

    def test_the_same_first_user_message(self, tmp_path, chat):
        train = [row("p", "ab"), row("q", "ab", "more", "cd")]
        pair = self.stores(tmp_path, chat, train, [row("z", "ab"), row(" q", "other")])
        with pytest.raises(
            ValueError,
            match=r"1 of 2 prompts .* row '1' of .*eval\.jsonl .* row '1' of .*train\.jsonl",
        ):
            check_disjoint(*pair)

    def test_the_same_ids_where_one_file_has_no_messages(self, tmp_path, chat):
        prompt = chat.prompt_ids(row("q")["messages"])
        train = [{"id": "a", "prompt_ids": prompt, "response_ids": [1, 2, 3]}]
        pair = self.stores(tmp_path, chat, train, [row("q", "ab")])
        with pytest.raises(ValueError, match=r"row '0' .* row 'a'"):
            check_disjoint(*pair)


def make_store(count: int, seed: int = 0) -> TokenStore:
    rng = np.random.default_rng(seed)
    return TokenStore(
        sample_from_ids(str(i), [i + 1] * 2, [i + 1] * int(rng.integers(2, 7)), max_length=8)
        for i in range(count)
    )


def loader(store, **options):
    return make_loader(store, **{"batch_size": 4, "seq_length": 8, "seed": 0, **options})


def ids_of(batches) -> list[list[int]]:
    return [batch["sample_id_B"].tolist() for batch in batches]


class TestBatches:
    def test_contents_and_padding(self):
        store = make_store(9)
        for batch in loader(store, epochs=2, pad_id=77):
            assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
                "tokens_BT": ((4, 8), np.int32),
                "loss_mask_BT": ((4, 8), bool),
                "length_B": ((4,), np.int32),
                "sample_id_B": ((4,), np.int32),
            }
            names = ("tokens_BT", "loss_mask_BT", "length_B", "sample_id_B")
            for tokens, mask, length, index in zip(*(batch[n] for n in names), strict=True):
                assert tokens.tolist() == [index + 1] * length + [77] * (8 - length)
                assert mask.tolist() == [False] * 2 + [True] * (length - 2) + [False] * (8 - length)
                assert length == store.lengths[index]

    def test_every_epoch_is_complete_and_has_its_own_order(self):
        batches = ids_of(loader(make_store(12), epochs=3))
        epochs = np.array(batches).reshape(3, 12)
        assert (np.sort(epochs, axis=1) == np.arange(12)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
        assert batches == ids_of(loader(make_store(12), epochs=3))
        assert batches != ids_of(loader(make_store(12), epochs=3, seed=1))

    def test_in_order_without_shuffle(self):
        assert ids_of(loader(make_store(8), epochs=1, shuffle=False)) == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]

    def test_without_end(self):
        iterator = iter(loader(make_store(5)))
        seen = [next(iterator)["sample_id_B"] for _ in range(25)]
        assert np.bincount(np.concatenate(seen)).tolist() == [20] * 5

    @pytest.mark.parametrize("drop", [True, False])
    def test_remainder_falls_at_the_end_of_the_run(self, drop):
        batches = list(loader(make_store(5), epochs=2, drop_remainder=drop))
        assert len(batches) == num_batches(5, batch_size=4, epochs=2, drop_remainder=drop)
        seen = np.concatenate([batch["sample_id_B"] for batch in batches])
        if drop:
            assert len(batches) == 2
            assert len(seen) == 8
            return
        assert len(batches) == 3
        assert np.bincount(seen[seen >= 0]).tolist() == [2] * 5
        last = batches[-1]
        assert last["sample_id_B"][2:].tolist() == [-1, -1]
        assert last["length_B"][2:].tolist() == [0, 0]
        assert not last["loss_mask_BT"][2:].any()

    def test_less_than_one_batch(self):
        with pytest.raises(ValueError, match="3 rows x 1 epochs are less than one batch of 4"):
            loader(make_store(3), epochs=1)

    def test_rows_longer_than_the_static_length(self):
        with pytest.raises(ValueError, match="seq_length is 3"):
            loader(make_store(4), seq_length=3)

    @pytest.mark.parametrize(("index", "count"), [(0, 3), (2, 2), (-1, 2)])
    def test_bad_hosts(self, index, count):
        with pytest.raises(ValueError, match=f"host {index} of {count}"):
            loader(make_store(8), host_index=index, host_count=count)

    def test_an_empty_store(self):
        with pytest.raises(ValueError, match="no training samples"):
            TokenStore([])


class TestHostShards:
    """pitfalls.md: host shards are disjoint and complete; a changed host count is handled."""

    @given(
        rows=st.integers(1, 30),
        per_host=st.integers(1, 3),
        hosts=st.sampled_from([1, 2, 3, 4]),
        epochs=st.integers(1, 3),
        drop=st.booleans(),
    )
    @settings(max_examples=40, deadline=None)
    def test_disjoint_and_complete(self, rows, per_host, hosts, epochs, drop):
        size = per_host * hosts
        if drop and rows * epochs < size:
            return
        options = {"batch_size": size, "epochs": epochs, "drop_remainder": drop}
        shards = [
            ids_of(loader(make_store(rows), host_index=h, host_count=hosts, **options))
            for h in range(hosts)
        ]
        assert len({len(shard) for shard in shards}) == 1  # else a host waits for ever
        whole = ids_of(loader(make_store(rows), **options))
        # Step for step, the hosts together have what one host alone would have.
        for step, expected in enumerate(whole):
            assert sorted(i for shard in shards for i in shard[step]) == sorted(expected)
        counts = np.bincount([i for batch in whole for i in batch if i >= 0], minlength=rows)
        lost = rows * epochs - counts.sum()
        assert lost == (rows * epochs % size if drop else 0)
        assert counts.max() - counts.min() <= (1 if lost < rows else epochs)

    def test_resume_on_another_host_count(self):
        store = make_store(10)
        one = iter(loader(store))
        whole = ids_of(next(one) for _ in range(12))
        two = [iter(loader(store, host_index=h, host_count=2)) for h in range(2)]
        for _ in range(5):
            for host in two:
                next(host)
        assert two[0].get_state() == two[1].get_state()
        four = [iter(loader(store, host_index=h, host_count=4)) for h in range(4)]
        for host in four:
            host.set_state(two[0].get_state())
        for step in range(5, 12):
            rows = [i for host in four for i in next(host)["sample_id_B"].tolist()]
            assert sorted(rows) == sorted(whole[step])


class TestResume:
    """pitfalls.md: 20 steps = 10 + stop + 10, sample ids included."""

    @pytest.mark.parametrize("stop", [0, 1, 3, 10, 19])
    def test_exact(self, stop):
        store = make_store(7)
        straight = iter(loader(store))
        expected = [next(straight) for _ in range(20)]
        first = iter(loader(store))
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        next(first)  # what was fetched after the state was taken does not count
        second = iter(loader(store))
        second.set_state(state)
        for batch in expected[stop:]:
            got = next(second)
            for key, value in batch.items():
                np.testing.assert_array_equal(got[key], value)

    def test_at_the_end(self):
        store = make_store(8)
        iterator = iter(loader(store, epochs=1))
        assert len(list(iterator)) == 2
        resumed = iter(loader(store, epochs=1))
        resumed.set_state(iterator.get_state())
        assert list(resumed) == []

    def test_in_another_process(self):
        code = (
            "import json, sys, tests.test_data as t\n"
            "it = iter(t.loader(t.make_store(7)))\n"
            "it.set_state(json.loads(sys.argv[1]))\n"
            "print(json.dumps(t.ids_of(next(it) for _ in range(3))))"
        )
        iterator = iter(loader(make_store(7)))
        for _ in range(4):
            next(iterator)
        command = [sys.executable, "-c", code, json.dumps(iterator.get_state())]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert json.loads(out.stdout) == ids_of(next(iterator) for _ in range(3))


def test_imports_stay_light():
    """Reading data needs neither Transformers nor Flax nor the library."""
    code = (
        "import sys, train.data\n"
        "print([m for m in ('transformers', 'flax', 'dflash_jax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stderr
