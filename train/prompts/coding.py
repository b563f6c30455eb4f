"""Short coding tasks, composed from what a function takes, keeps, does and returns."""

from __future__ import annotations

import random
from collections.abc import Iterator

_OPENINGS = (
    "Write a Python function that {task}.",
    "Write a function in Python that {task}.",
    "Can you write a Python function that {task}?",
    "I need a Python function that {task}.",
    "Create a short Python function that {task}.",
    "Implement a Python function that {task}.",
    "How would you write a Python function that {task}?",
    "In Python, write code that {task}.",
    "Write a {language} function that {task}.",
    "Show me a {language} function that {task}.",
    "Give me a one-line Python expression or a short function that {task}.",
    "Define a function that {task}. Use Python.",
)
_ENDINGS = (
    "",
    "",
    "",
    " Include a docstring.",
    " Use type hints.",
    " Add an example of how to call it.",
    " Explain the code in two sentences.",
    " Do not use any imports.",
    " Write three test cases with assert as well.",
    " Keep it simple and readable.",
    " What is its time complexity?",
    " Only show the code.",
    " Handle empty input.",
)
_LANGUAGES = ("JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "Ruby", "Bash")

_NUMBERS = (
    "a list of integers",
    "a list of numbers",
    "a tuple of integers",
    "a list of floats",
    "an array of temperatures",
    "a list of test scores",
    "a list of prices in cents",
    "a list of measurements",
)
_NUMBER_FILTERS = (
    "the even ones",
    "the odd ones",
    "those greater than {n}",
    "those less than {n}",
    "those divisible by {n}",
    "the negative ones",
    "those between {n} and {m}",
    "those that occur more than once",
    "those at even positions",
    "every third one",
    "those above the average",
)
_NUMBER_RESULTS = (
    "returns the sum of {kept}",
    "returns how many there are of {kept}",
    "returns the largest of {kept}",
    "returns the smallest of {kept}, or None if there are none",
    "returns the average of {kept}",
    "returns a new list with {kept}, in reverse order",
    "returns a new list with the squares of {kept}",
    "returns {kept}, sorted from large to small",
    "removes {kept} and returns the rest",
    "replaces {kept} by zero",
    "returns the positions of {kept}",
    "prints {kept}, one on each line",
    "returns the running total of {kept}",
    "returns the difference between the largest and the smallest of {kept}",
)
_STRINGS = ("a string", "a sentence", "a line of text", "a paragraph", "a file name", "a password")
_STRING_RESULTS = (
    "returns the number of {things} in it",
    "returns it with all {things} removed",
    "returns it with all {things} replaced by '{char}'",
    "returns True if it has more {things} than {others}",
    "returns the positions of the {things} in it",
    "returns a dictionary that counts its {things}",
    "returns the first {n} {things} in it",
    "moves all {things} to its end",
    "splits it at its {things}",
    "checks that it contains at least {n} {things}",
)
_THINGS = (
    "vowels",
    "digits",
    "spaces",
    "upper-case letters",
    "lower-case letters",
    "punctuation marks",
    "repeated letters",
    "hyphens",
    "consonants",
    "commas",
)
_WORDS = ("a list of words", "a list of names", "a list of strings", "a list of cities")
_WORD_RESULTS = (
    "returns those longer than {n} characters",
    "returns those that start with '{char}'",
    "returns those that end with '{char}', sorted by length",
    "groups them by their first letter in a dictionary",
    "groups them by length in a dictionary",
    "joins them with '{char}' and capitalizes each",
    "returns the longest one; among equals, the first",
    "counts how often each one occurs, ignoring case",
    "removes duplicates but keeps their order",
    "returns pairs of neighbours as tuples",
    "returns the {n} most frequent ones",
    "sorts them by their last letter",
)
_KEYS = ("names", "products", "countries", "student ids", "words", "cities", "user names", "books")
_VALUES = (
    "ages",
    "prices",
    "scores",
    "populations",
    "lists of grades",
    "counts",
    "dates",
    "ratings",
)
_DICT_RESULTS = (
    "returns the {key} with the largest value",
    "returns the {keys} in order of their {values}",
    "swaps keys and values",
    "returns a new dictionary without entries below {n}",
    "merges it with a second one by adding up what they share",
    "returns the average of the {values}",
    "returns how many {keys} have the same value",
    "prints a table of {keys} and {values} with aligned columns",
    "returns the {keys} that start with '{char}'",
    "converts it to a list of (key, value) pairs sorted by key",
)
_SINGLE = (
    "takes a number of seconds and returns it as hours, minutes and seconds",
    "takes two dates and returns the days between them",
    "rolls {n} dice {m} times and returns how often each sum came up",
    "takes a matrix as a list of rows and returns column {n} of it",
    "takes a matrix and returns it rotated by 90 degrees",
    "reads a CSV file and returns column {n} as a list of floats",
    "reads a text file and returns its {n} longest lines",
    "takes a list of (name, score) tuples and returns the names of the top {n}",
    "prints a triangle of '{char}' characters with {n} rows",
    "prints a multiplication table from 1 to {n}",
    "takes a nested list and returns how deep it is",
    "splits a list into chunks of {n}",
    "returns the first {m} multiples of {n}",
    "converts a number to base {n}",
    "takes an integer and returns its digits multiplied together, {n} times over",
    "simulates a stack with push, pop and a limit of {m} items",
    "retries a function up to {n} times when it raises an exception",
    "caches the last {m} results of another function",
    "generates a random password of {m} characters with at least {n} digits",
    "draws a {n} by {m} grid of '{char}' in the terminal",
)


def _task(rng: random.Random) -> str:
    kind = rng.randrange(5)
    n = rng.randint(2, 20)
    values = {"n": n, "m": n + rng.randint(2, 80), "char": rng.choice("abcdemnrst*#-_.+")}
    if kind == 0:
        kept = rng.choice(_NUMBER_FILTERS).format(**values)
        return f"takes {rng.choice(_NUMBERS)} and " + rng.choice(_NUMBER_RESULTS).format(kept=kept)
    if kind == 1:
        things, others = rng.sample(_THINGS, 2)
        result = rng.choice(_STRING_RESULTS).format(things=things, others=others, **values)
        return f"takes {rng.choice(_STRINGS)} and {result}"
    if kind == 2:
        return f"takes {rng.choice(_WORDS)} and " + rng.choice(_WORD_RESULTS).format(**values)
    if kind == 3:
        keys, held = rng.choice(_KEYS), rng.choice(_VALUES)
        key = "country" if keys == "countries" else "city" if keys == "cities" else keys[:-1]
        result = rng.choice(_DICT_RESULTS).format(key=key, keys=keys, values=held, **values)
        return f"takes a dictionary from {keys} to {held} and {result}"
    return rng.choice(_SINGLE).format(**values)


def texts(rng: random.Random) -> Iterator[str]:
    """Tasks without end; some come again."""
    while True:
        opening = rng.choice(_OPENINGS).format(task=_task(rng), language=rng.choice(_LANGUAGES))
        yield opening + rng.choice(_ENDINGS)
