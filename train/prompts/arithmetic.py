"""Plain sums, unit conversions and percentages: numbers to work out, without a story."""

from __future__ import annotations

import random
from collections.abc import Iterator

_ENDINGS = (
    "",
    "",
    "",
    " Show your work.",
    " Explain each step.",
    " Think step by step.",
    " Give only the result.",
    " Round to two decimals.",
)
_ASK = (
    "What is {x}?",
    "Calculate {x}.",
    "Compute {x}.",
    "Work out {x}.",
    "Evaluate {x}.",
    "{x} = ?",
    "Find the value of {x}.",
    "How much is {x}?",
)
_UNITS = (
    ("kilometers", "miles", "meters", "feet", "yards", "centimeters", "inches"),
    ("kilograms", "pounds", "grams", "ounces", "tons"),
    ("liters", "gallons", "milliliters", "pints", "fluid ounces"),
    ("hours", "minutes", "seconds", "days", "weeks"),
    ("degrees Celsius", "degrees Fahrenheit", "kelvin"),
    ("square meters", "square feet", "acres", "hectares"),
    ("kilometers per hour", "meters per second", "miles per hour", "knots"),
    ("bytes", "kilobytes", "megabytes", "gigabytes"),
    ("joules", "calories", "kilowatt-hours"),
)
_CONVERT = (
    "Convert {n} {a} to {b}.",
    "How many {b} are {n} {a}?",
    "What is {n} {a} in {b}?",
    "Express {n} {a} in {b}.",
    "{n} {a} is how many {b}?",
    "Which is more: {n} {a} or {m} {b}?",
    "Make a table that converts {n}, {m} and {k} {a} to {b}.",
)
_PERCENT = (
    "What is {p}% of {n}?",
    "{n} is what percent of {m}?",
    "Increase {n} by {p}%.",
    "Decrease {n} by {p}%.",
    "A value goes from {n} to {m}. What is the change in percent?",
    "{n} is {p}% of which number?",
    "Write {p}% as a fraction in lowest terms.",
    "Which is larger: {p}% of {n} or {q}% of {m}?",
    "Add {p}% to {n}, then take {q}% off. What remains?",
)
_OTHER = (
    "What is the average of {n}, {m} and {k}?",
    "Find the median of {n}, {m}, {k}, {p} and {q}.",
    "Put these numbers in order from smallest to largest: {n}, {m}, {k}, {p}, {q}.",
    "Is {n} divisible by {p}?",
    "What is the remainder when {n} is divided by {p}?",
    "Find the greatest common divisor of {n} and {m}.",
    "Find the least common multiple of {p} and {q}.",
    "List the factors of {n}.",
    "Write {n} in binary.",
    "Write {n} in Roman numerals.",
    "Round {n}.{k} to the nearest ten.",
    "Simplify the fraction {n}/{m}.",
    "Add the fractions {p}/{q} and {q}/{k}.",
    "Solve for x: {p}x + {n} = {m}.",
    "Solve for x: {p}(x - {q}) = {n}.",
    "What are the next three numbers: {p}, {p2}, {p3}, {p4}?",
    "What is {p} squared plus {q} squared?",
    "Estimate the square root of {n} to one decimal.",
    "What is the area of a rectangle with sides {p} cm and {q} cm?",
    "What is the circumference of a circle with radius {p} cm?",
    "What is the volume of a box of {p} x {q} x {p2} cm?",
)


def texts(rng: random.Random) -> Iterator[str]:
    """Questions without end; some come again."""
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            text = rng.choice(_ASK).format(x=_expression(rng))
        elif kind == 1:
            a, b = rng.sample(rng.choice(_UNITS), 2)
            amounts = {key: _amount(rng) for key in "nmk"}
            text = rng.choice(_CONVERT).format(a=a, b=b, **amounts)
        else:
            p, step = rng.randint(2, 95), rng.randint(2, 9)
            text = rng.choice(_PERCENT if kind == 2 else _OTHER).format(
                n=rng.randint(10, 2000),
                m=rng.randint(10, 2000),
                k=rng.randint(3, 99),
                p=p,
                q=rng.randint(2, 95),
                p2=p + step,
                p3=p + 2 * step,
                p4=p + 3 * step,
            )
        yield text + rng.choice(_ENDINGS)


def _amount(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return str(rng.randint(2, 500))
    return f"{rng.uniform(0.1, 99):.{rng.randint(1, 2)}f}"


def _expression(rng: random.Random) -> str:
    """Two to four terms, sometimes with brackets."""
    numbers = [rng.randint(2, rng.choice((12, 99, 999))) for _ in range(rng.randint(2, 4))]
    signs = rng.choice((("+", "-", "*"), ("+", "-", "×", "÷"), ("plus", "minus", "times")))
    text = str(numbers[0])
    for i, number in enumerate(numbers[1:]):
        if i == 1 and rng.random() < 0.4:
            text = f"({text})"
        text += f" {rng.choice(signs)} {number}"
    return text
