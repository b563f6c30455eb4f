"""Requests to rewrite, summarise, explain or list, over people's sentences and over topics."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator

from train.conversations import Conversation, first_user_text, is_held_out

_REWRITE = (
    "Rewrite this sentence in a more formal tone: {text}",
    "Rewrite the following in simple English.\n\n{text}",
    "Paraphrase: {text}",
    "Make this sound friendlier: {text}",
    "Shorten this to at most {n} words: {text}",
    "Correct the grammar and spelling: {text}",
    "Turn this into a question: {text}",
    "Rewrite this in the past tense: {text}",
    "Rewrite this as a polite email.\n\n{text}",
    "Say this in three different ways:\n\n{text}",
    "Translate this into {language}: {text}",
    "Write a headline for this text:\n\n{text}",
    "Rewrite this from the point of view of a {person}:\n\n{text}",
    "Expand this into a short paragraph: {text}",
    "Replace the difficult words in this text: {text}",
    "What is the tone of this message? {text}",
)
_SUMMARISE = (
    "Summarize the following text in one sentence.\n\n{text}",
    "Summarize this in {n} bullet points:\n\n{text}",
    "TL;DR:\n\n{text}",
    "What is the main point of this text?\n\n{text}",
    "Extract the key words from this text:\n\n{text}",
    "Write a title and a one-line summary for this:\n\n{text}",
    "Which question does this text ask?\n\n{text}",
    "Turn this text into a numbered list:\n\n{text}",
)
_ON_TOPICS = (
    "List {n} {things} about {topic}.",
    "Give me {n} {things} for {topic}.",
    "Make a list of {n} {things} on {topic}, each with a short explanation.",
    "Write a checklist with {n} {things} for {topic}.",
    "Write a short paragraph about {topic} for a {person}.",
    "Explain {topic} to a {person}.",
    "Write {n} interview questions about {topic}.",
    "Make a table of {n} {things} for {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a four-line poem about {topic}.",
    "Write a product description about {topic} in {n} sentences.",
    "Plan a {n}-day introduction to {topic}.",
    "Compare {topic} with {other}.",
    "Write a dialogue between a {person} and a teacher about {topic}.",
    "Define {topic} and give {n} examples.",
)
_THINGS = ("tips", "ideas", "facts", "common mistakes", "questions", "steps", "rules", "reasons")
_PEOPLE = ("child", "beginner", "doctor", "pirate", "scientist", "student", "journalist", "farmer")
_LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
_TOPICS = (
    "gardening on a balcony",
    "learning to swim",
    "the water cycle",
    "writing a CV",
    "saving energy at home",
    "public speaking",
    "electric cars",
    "healthy breakfasts",
    "the planets",
    "time management",
    "remote work",
    "volcanoes",
    "baking bread",
    "photosynthesis",
    "traveling alone",
    "chess openings",
    "recycling",
    "the history of printing",
    "buying a used bicycle",
    "studying for exams",
    "machine learning",
    "keeping a diary",
    "coffee",
    "bird watching",
    "online privacy",
    "running a small business",
    "the human heart",
    "painting with watercolors",
    "databases",
    "camping in the rain",
    "the solar system",
    "good passwords",
    "learning a second language",
    "home repairs",
    "climate and weather",
    "playing the guitar",
    "team meetings",
    "sleep",
    "houseplants",
    "the internet",
)
_SENTENCE = re.compile(r"[A-Z][^.!?\n`<>{}|\\]{25,240}[.!?](?=\s|$)")


def sentences(
    conversations: Iterable[Conversation], held_out_fraction: float
) -> Iterator[list[str]]:
    """Runs of up to four plain English sentences from each conversation's first user turn, of
    those that are not held out."""
    for conversation in conversations:
        text = first_user_text(conversation.messages)
        if is_held_out(text, held_out_fraction):
            continue
        found = [match.group() for match in _SENTENCE.finditer(text) if _is_plain(match.group())]
        if found:
            yield found[:4]


def _is_plain(sentence: str) -> bool:
    words = sentence.split()
    odd = any(mark in sentence for mark in ("http", "@", "=", "_", "#", "["))
    return sentence.isascii() and not odd and 6 <= len(words) <= 40


def texts(rng: random.Random, runs: list[list[str]]) -> Iterator[str]:
    """Requests without end, half of them over `runs` of sentences; some come again."""
    while True:
        n = rng.randint(3, 12)
        values = {"n": n, "language": rng.choice(_LANGUAGES), "person": rng.choice(_PEOPLE)}
        if runs and rng.random() < 0.6:
            run = rng.choice(runs)
            forms = _SUMMARISE if len(run) > 1 and rng.random() < 0.6 else _REWRITE
            text = " ".join(run) if forms is _SUMMARISE else rng.choice(run)
            yield rng.choice(forms).format(text=text, **values)
        else:
            topic, other = rng.sample(_TOPICS, 2)
            things = rng.choice(_THINGS)
            yield rng.choice(_ON_TOPICS).format(topic=topic, other=other, things=things, **values)
