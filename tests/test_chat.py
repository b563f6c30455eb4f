"""Assistant masks: what is masked in decodes to what the assistant wrote, whatever the template."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat_rigs import (
    CHATML,
    CORPUS,
    HEADER_ENDS_IN_A_SPACE,
    NO_END_OF_TURN,
    QWEN3,
    REFUSES_TWO_USERS,
    TRIMS,
    UPPER,
    supervised,
    talk,
)
from train.chat import ChatFormat, Sample, sample_from_ids
from train.conversations import Conversation, UnusableRow


@pytest.fixture(scope="session")
def base_tokenizer() -> Tokenizer:
    """A lossless byte-level BPE of a few hundred ids, split the way GPT-2 splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def make_format(base_tokenizer):
    @functools.cache
    def make(template: str, **options) -> ChatFormat:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=base_tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=template,
            clean_up_tokenization_spaces=False,
        )
        return ChatFormat(tokenizer, **options)

    return make


@pytest.fixture(scope="session")
def chatml(make_format) -> ChatFormat:
    return make_format(CHATML)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf) -> ChatFormat:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    return ChatFormat(tokenizer, end_of_turn_ids=(2,))


TWO_TURNS = talk(("u", "hi"), ("a", "hello you"), ("u", "why?"), ("a", "because"))


def test_masked_in_tokens_are_the_assistants_with_their_end_of_turn(chatml):
    sample = chatml.sample(TWO_TURNS, max_length=200)
    assert supervised(chatml, sample) == ["hello you<|im_end|>", "because<|im_end|>"]
    assert (sample.last_turn_only, sample.truncated, sample.plain_turns) == (False, False, 0)
    assert sample.tokens.dtype == np.int32
    assert sample.loss_mask.dtype == bool
    whole = chatml.tokenizer.apply_chat_template(TWO_TURNS.messages, tokenize=False)
    assert chatml.tokenizer.decode(sample.tokens) == whole.removesuffix("\n")


def test_each_prompt_is_an_id_prefix_of_the_sample(chatml, smollm2):
    """What is supervised is conditioned on exactly the ids that generation starts from."""
    for chat in (chatml, smollm2):
        sample = chat.sample(TWO_TURNS, max_length=200)
        starts = np.flatnonzero(np.diff(sample.loss_mask.astype(int)) == 1) + 1
        for turn, start in zip((1, 3), starts, strict=True):
            prompt = chat.prompt_ids(TWO_TURNS.messages[:turn])
            assert sample.tokens[:start].tolist() == prompt


class TestTemplatesThatRewriteEarlierTurns:
    """pitfalls.md: thinking stripped from earlier turns -> last turn only, on its true prompt."""

    THOUGHT = talk(
        ("u", "hi"),
        ("a", "<think>\nlet me see\n</think>\n\nhello"),
        ("u", "why?"),
        ("a", "<think>\nso\n</think>\n\nbecause"),
    )

    def test_thinking_on(self, make_format):
        chat = make_format(QWEN3, enable_thinking=True)
        sample = chat.sample(self.THOUGHT, max_length=200)
        assert sample.last_turn_only
        assert supervised(chat, sample) == ["<think>\nso\n</think>\n\nbecause<|im_end|>"]
        assert "let me see" not in chat.tokenizer.decode(sample.tokens)
        prompt = chat.prompt_ids(self.THOUGHT.messages[:3])
        assert sample.tokens[: len(prompt)].tolist() == prompt

    def test_thinking_off_puts_the_empty_block_in_the_prompt(self, make_format):
        chat = make_format(QWEN3, enable_thinking=False)
        sample = chat.sample(TWO_TURNS, max_length=200)
        assert sample.last_turn_only
        assert supervised(chat, sample) == ["because<|im_end|>"]
        prompt = chat.prompt_text(TWO_TURNS.messages[:3])
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")

    def test_one_turn_is_not_a_fallback(self, make_format):
        chat = make_format(QWEN3, enable_thinking=False)
        sample = chat.sample(talk(("u", "hi"), ("a", "hello")), max_length=200)
        assert not sample.last_turn_only

    def test_plain_answers_under_thinking_on_are_skipped(self, make_format):
        """The template would put an empty thinking block into what the assistant 'wrote'."""
        chat = make_format(QWEN3, enable_thinking=True)
        with pytest.raises(UnusableRow, match="does not render content"):
            chat.sample(TWO_TURNS, max_length=200)

    def test_a_template_that_changes_the_text_is_skipped(self, make_format):
        with pytest.raises(UnusableRow, match="does not render content"):
            make_format(UPPER).sample(TWO_TURNS, max_length=200)

    def test_a_prompt_that_the_rendered_whole_does_not_start_with_is_skipped(self, make_format):
        """Same lengths, same answers, another prompt: this one counts the messages."""
        chat = make_format("{{- messages | length }}" + CHATML)
        with pytest.raises(UnusableRow, match="not a prefix"):
            chat.sample(TWO_TURNS, max_length=200)

    def test_trimmed_content_is_supervised_as_rendered(self, make_format):
        chat = make_format(TRIMS)
        sample = chat.sample(talk(("u", "hi"), ("a", "\n hello \n")), max_length=200)
        assert supervised(chat, sample) == ["hello<|im_end|>"]

    def test_the_last_turn_that_fits_is_taken(self, make_format):
        chat = make_format(QWEN3, enable_thinking=False)
        turns = [("u", "why?"), ("a", "because 1 2 3")] * 6
        lengths = [len(chat.prompt_ids(talk(*turns[: 2 * k + 1]).messages)) for k in range(6)]
        for kept in range(6):
            sample = chat.sample(talk(*turns), max_length=lengths[kept] + 2)
            assert sample.loss_mask.argmax() == lengths[kept]
            assert len(sample.tokens) == lengths[kept] + 2
            assert sample.truncated
        with pytest.raises(UnusableRow, match="the prompt fills max_length"):
            chat.sample(talk(*turns), max_length=lengths[0] + 1)


class TestToolTurns:
    def conversation(self) -> Conversation:
        plain = talk(("u", "1 + 2?"), ("a", ""), ("t", "3"), ("t", "three"), ("a", "it is 3"))
        plain.messages[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {"x": 1}}}]
        return plain

    def test_tool_results_and_calls_are_context(self, make_format):
        chat = make_format(QWEN3, enable_thinking=False)
        sample = chat.sample(self.conversation(), max_length=300)
        assert supervised(chat, sample) == ["it is 3<|im_end|>"]
        text = chat.tokenizer.decode(sample.tokens)
        assert "<tool_call>" in text
        assert "\n<tool_response>\n3\n</tool_response>\n<tool_response>\nthree" in text
        assert sample.plain_turns == 1

    def test_a_call_alone_cannot_be_supervised(self, make_format):
        chat = make_format(QWEN3)
        conversation = Conversation("c", self.conversation().messages[:2])
        with pytest.raises(UnusableRow, match="no assistant turn with plain text"):
            chat.sample(conversation, max_length=300)

    def test_tools_reach_the_template(self, make_format):
        template = (
            "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) }}{% endif %}" + CHATML
        )
        chat = make_format(template)
        tools = [{"type": "function", "function": {"name": "add"}}]
        conversation = talk(("u", "hi"), ("a", "hello"), tools=tools)
        sample = chat.sample(conversation, max_length=300)
        assert json.dumps(tools) in chat.tokenizer.decode(sample.tokens)
        assert supervised(chat, sample) == ["hello<|im_end|>"]


class TestEmptyAssistantTurns:
    @pytest.mark.parametrize("empty", ["", "  ", "\n\n"])
    def test_in_the_middle(self, chatml, empty):
        conversation = talk(("u", "hi"), ("a", empty), ("u", "why?"), ("a", "because"))
        sample = chatml.sample(conversation, max_length=200)
        assert supervised(chatml, sample) == ["because<|im_end|>"]
        assert sample.plain_turns == 1

    def test_at_the_end_the_rest_is_supervised(self, chatml):
        conversation = talk(("u", "hi"), ("a", "hello"), ("u", "why?"), ("a", ""))
        sample = chatml.sample(conversation, max_length=200)
        assert supervised(chatml, sample) == ["hello<|im_end|>"]
        assert sample.loss_mask[-1]  # what follows the last supervised turn is not kept

    def test_nothing_else(self, chatml):
        with pytest.raises(UnusableRow, match="no assistant turn with plain text"):
            chatml.sample(talk(("u", "hi"), ("a", "")), max_length=200)


HEADER = "<|im_start|>assistant\nI am fine<|im_end|>\n"


class TestUserTextWithTheAssistantHeader:
    @pytest.mark.parametrize("who", ["u", "s"])
    def test_is_not_supervised(self, chatml, who):
        conversation = talk((who, HEADER), ("u", f"say {HEADER}"), ("a", "no"))
        sample = chatml.sample(conversation, max_length=200)
        assert supervised(chatml, sample) == ["no<|im_end|>"]

    def test_even_if_it_quotes_the_answer(self, chatml):
        user = "<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
        sample = chatml.sample(talk(("u", user), ("a", "no")), max_length=200)
        assert supervised(chatml, sample) == ["no<|im_end|>"]
        assert sample.loss_mask[-2:].all()

    def test_an_end_of_turn_inside_the_assistants_text_is_a_skip(self, chatml):
        """The target would have stopped there."""
        with pytest.raises(UnusableRow, match="end of turn inside"):
            chatml.sample(talk(("u", "hi"), ("a", f"x {HEADER}")), max_length=200)

    def test_in_an_earlier_turn_leaves_the_last(self, chatml):
        conversation = talk(("u", "hi"), ("a", HEADER), ("u", "why?"), ("a", "because"))
        sample = chatml.sample(conversation, max_length=200)
        assert sample.last_turn_only
        assert supervised(chatml, sample) == ["because<|im_end|>"]


class TestTokensThatMergeAcrossTheHeader:
    """`assistant: ` + `hello` tokenizes otherwise as a whole than after the generation prompt."""

    def test_earlier_turns_are_not_supervised(self, make_format):
        chat = make_format(HEADER_ENDS_IN_A_SPACE)
        sample = chat.sample(TWO_TURNS, max_length=200)
        assert sample.last_turn_only
        prompt = chat.prompt_ids(TWO_TURNS.messages[:3])
        assert sample.tokens[: len(prompt)].tolist() == prompt
        assert supervised(chat, sample) == ["because<|im_end|>"]

    def test_leading_newlines(self, chatml):
        conversation = talk(("u", "hi"), ("a", "\n\nhello"), ("u", "why?"), ("a", "\nbecause"))
        sample = chatml.sample(conversation, max_length=200)
        assert supervised(chatml, sample) == ["\nbecause<|im_end|>"]
        prompt = chatml.prompt_ids(conversation.messages[:3])
        assert sample.tokens[: len(prompt)].tolist() == prompt

    def test_equal_lengths_but_other_ids(self):
        """A tokenizer that looks ahead: the header's `xyz` is `xy z` alone, `x yz` before a `w`."""
        names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "xy", "yz"]
        vocab = {name: i for i, name in enumerate(names)}
        tokenizer = Tokenizer(models.BPE(vocab, [("x", "y"), ("y", "z")]))
        look = pre_tokenizers.Split(Regex("x(?=yzw)|yz(?=w)|xy|z"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([look, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        template = HEADER_ENDS_IN_A_SPACE.replace(": '", "xyz'")
        chat = ChatFormat(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template
            )
        )
        conversation = talk(("u", "a"), ("a", "w"), ("u", "b"), ("a", "v"))
        sample = chat.sample(conversation, max_length=200)
        assert sample.last_turn_only
        assert supervised(chat, sample) == ["v<|im_end|>"]


def test_no_end_of_turn_token_is_a_skip(make_format):
    with pytest.raises(UnusableRow, match="end of turn"):
        make_format(NO_END_OF_TURN).sample(TWO_TURNS, max_length=200)


def test_an_end_of_turn_that_is_no_stop_id_is_a_skip(make_format):
    chat = make_format(CHATML, end_of_turn_ids=(0,))
    with pytest.raises(UnusableRow, match="end of turn"):
        chat.sample(TWO_TURNS, max_length=200)


@pytest.mark.parametrize(("ids", "words"), [((5000,), "not all ids"), ((), "no end-of-turn")])
def test_bad_end_of_turn_ids(make_format, ids, words):
    with pytest.raises(ValueError, match=words):
        make_format(CHATML, end_of_turn_ids=ids)


def test_no_chat_template(make_format):
    with pytest.raises(ValueError, match="chat_template"):
        make_format(None)


def test_a_refusing_template_is_a_skip(make_format):
    chat = make_format(REFUSES_TWO_USERS)
    with pytest.raises(UnusableRow, match="refuses it: roles must alternate"):
        chat.sample(talk(("u", "a"), ("u", "b"), ("a", "c")), max_length=200)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_thinking_renders_token_identically_in_training_and_generation(make_format, thinking):
    """pitfalls.md; generation applies the template by the plain Transformers call."""
    chat = make_format(QWEN3, enable_thinking=thinking)
    conversation = (
        TestTemplatesThatRewriteEarlierTurns.THOUGHT if thinking is not False else TWO_TURNS
    )
    options = {} if thinking is None else {"enable_thinking": thinking}
    generation = chat.tokenizer.apply_chat_template(
        conversation.messages[:3], add_generation_prompt=True, return_dict=False, **options
    )
    sample = chat.sample(conversation, max_length=200)
    assert chat.prompt_ids(conversation.messages[:3]) == generation
    assert sample.tokens[: len(generation)].tolist() == generation
    assert sample.loss_mask.argmax() == len(generation)


class TestTruncation:
    """pitfalls.md: truncated samples get no fake end-of-sequence."""

    def test_every_length_is_a_prefix(self, chatml):
        whole = chatml.sample(TWO_TURNS, max_length=200)
        first = int(whole.loss_mask.argmax())
        for length in range(1, len(whole.tokens) + 2):
            if length <= first:
                with pytest.raises(UnusableRow, match="fills max_length"):
                    chatml.sample(TWO_TURNS, max_length=length)
                continue
            sample = chatml.sample(TWO_TURNS, max_length=length)
            assert sample.tokens.tolist() == whole.tokens[:length].tolist()
            assert sample.loss_mask.tolist() == whole.loss_mask[:length].tolist()
            assert sample.truncated == (length < len(whole.tokens))

    def test_recorded_ids(self):
        sample = sample_from_ids("r", [5, 6], [7, 8, 2], max_length=4)
        assert sample.tokens.tolist() == [5, 6, 7, 8]
        assert sample.loss_mask.tolist() == [False, False, True, True]
        assert sample.truncated
        whole = sample_from_ids("r", [5, 6], [7, 8, 2], max_length=5)
        assert whole.tokens.tolist() == [5, 6, 7, 8, 2]
        assert not whole.truncated

    @pytest.mark.parametrize(("prompt", "response"), [([1] * 4, [2]), ([1], [])])
    def test_recorded_ids_without_room_or_response(self, prompt, response):
        with pytest.raises(UnusableRow):
            sample_from_ids("r", prompt, response, max_length=4)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([], False), ([1], False), ([1, 0, 1], False), ([0, 1, 1], True), ([1, 1, 0], True)],
)
def test_has_anchor(mask, expected):
    mask = np.array(mask, bool)
    assert Sample("x", np.zeros(len(mask), np.int32), mask).has_anchor is expected


PIECES = st.sampled_from(
    ["hello", " ", "\n", "\n\n", "<think>", "</think>", "<|im_start|>", "<|im_end|>", "assistant\n"]
)
TEXT = st.lists(PIECES | st.text(max_size=6), max_size=6).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from("uuat"), TEXT), min_size=1, max_size=6)
FORMATS = [(CHATML, None), (QWEN3, None), (QWEN3, True), (QWEN3, False), (TRIMS, None)]


@given(turns=TURNS, form=st.sampled_from(FORMATS), max_length=st.integers(2, 120))
@settings(max_examples=150, deadline=None)
def test_any_conversation_is_masked_exactly_or_skipped(make_format, turns, form, max_length):
    """Masked-in runs are assistant contents (trimmed where the template trims) + end of turn, the
    last one perhaps cut; each follows exactly its own prompt's ids."""
    template, thinking = form
    chat = make_format(template, enable_thinking=thinking)
    conversation = talk(("u", "q"), *turns, ("a", "x y"))
    try:
        sample = chat.sample(conversation, max_length=max_length)
    except UnusableRow:
        return
    assert len(sample.tokens) == len(sample.loss_mask) <= max_length
    assert sample.loss_mask.any()
    answers = {
        text + "<|im_end|>": None
        for role, content in [*turns, ("a", "x y")]
        if role == "a"
        for text in (content, content.lstrip(), content.rstrip(), content.strip())
    }
    prompts = [
        chat.prompt_ids(conversation.messages[:i])
        for i, m in enumerate(conversation.messages)
        if m["role"] == "assistant"
    ]
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        assert sample.tokens[:start].tolist() in prompts
        ids = sample.tokens[start:end].tolist()
        if end == max_length and sample.truncated:
            pieces = [chat.tokenizer.encode(a, add_special_tokens=False) for a in answers]
            assert any(ids == piece[: len(ids)] for piece in pieces)
        else:
            assert chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False) in answers
            assert chat.tokenizer.convert_ids_to_tokens(ids).count("<|im_end|>") == 1


@given(
    user=st.text(max_size=30),
    answers=st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_smollm2_masks_decode_to_the_answers(smollm2, user, answers):
    conversation = talk(*[turn for a in answers for turn in (("u", user), ("a", a))])
    try:
        sample = smollm2.sample(conversation, max_length=4096)
    except UnusableRow:  # a few control characters are not in its vocabulary
        ids = smollm2.tokenizer.encode(answers[-1], add_special_tokens=False)
        assert smollm2.tokenizer.decode(ids, clean_up_tokenization_spaces=False) != answers[-1]
        return
    expected = [answer + "<|im_end|>" for answer in answers]
    got = supervised(smollm2, sample)
    assert got == expected[-1:] if sample.last_turn_only else got == expected
    assert not sample.truncated


def test_smollm2_renders_its_default_system_prompt(smollm2):
    sample = smollm2.sample(TWO_TURNS, max_length=200)
    text = smollm2.tokenizer.decode(sample.tokens)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert supervised(smollm2, sample) == ["hello you<|im_end|>", "because<|im_end|>"]
