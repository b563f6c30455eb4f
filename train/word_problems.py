"""Word problems written by rule, with their answers: a held-out set that no data set can contain.

Shops, trains and ages, five forms of each, small whole numbers throughout.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WordProblem:
    """Attributes:
    id: "kind/form/number".
    text: ends with the question, sometimes with a request to explain.
    answer: a whole number.
    """

    id: str
    text: str
    answer: int


# fmt: off
_NAMES = (
    "Amara", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas",
    "Keiko", "Lars", "Mina", "Nadia", "Omar", "Priya", "Quentin", "Rosa", "Stefan", "Tamar",
    "Uma", "Viktor", "Wanda", "Xavier", "Yara", "Zoltan",
)
_GOODS = (
    "notebooks", "candles", "oranges", "postcards", "mugs", "scarves", "pencils", "bulbs",
    "plates", "kites", "magnets", "baskets", "lanterns", "puzzles", "brushes", "towels",
)
_PLACES = (
    "Alton", "Bergen", "Corvo", "Dunmore", "Elvas", "Fulda", "Gavle", "Harlow", "Imola",
    "Jena", "Kalmar", "Lugo", "Merano", "Nantes", "Olbia", "Porto",
)
# fmt: on
_ENDINGS = ("", "", "", " Explain your answer.", " Show your work.", " Think step by step.")

# A form draws what it needs and returns (text, answer).
Form = Callable[[random.Random], tuple[str, int]]


def _basket(rng: random.Random) -> tuple[str, int]:
    name, (one, other) = rng.choice(_NAMES), rng.sample(_GOODS, 2)
    a, b, p, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 15), rng.randint(2, 15)
    return (
        f"{name} buys {a} {one} at {p} dollars each and {b} {other} at {q} dollars each. "
        f"How much does {name} pay in all?"
    ), a * p + b * q


def _change(rng: random.Random) -> tuple[str, int]:
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    a, p, left = rng.randint(3, 9), rng.randint(2, 12), rng.randint(1, 30)
    return (
        f"A shop sells {goods} for {p} dollars apiece. {name} walks in with {a * p + left} "
        f"dollars and leaves with {a} {goods}. How many dollars does {name} still have?"
    ), left


def _stock(rng: random.Random) -> tuple[str, int]:
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    a, k, left = rng.randint(4, 25), rng.choice((2, 3)), rng.randint(5, 40)
    times = {2: "twice", 3: "three times"}[k]
    return (
        f"There are {a * (1 + k) + left} {goods} on the shelves of {name}'s shop. In the morning "
        f"{a} of them are sold, and in the afternoon {times} as many. How many {goods} are left "
        "in the evening?"
    ), left


def _takings(rng: random.Random) -> tuple[str, int]:
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    a, more, p = rng.randint(5, 30), rng.randint(2, 12), rng.randint(2, 9)
    return (
        f"On Monday {name} sold {a} {goods}. On Tuesday {name} sold {more} more than on Monday. "
        f"If the price is {p} dollars each, how much money came in over the two days?"
    ), (2 * a + more) * p


def _sale(rng: random.Random) -> tuple[str, int]:
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    n, p, off = rng.randint(2, 8), 20 * rng.randint(1, 6), rng.choice((10, 15, 20, 25, 30, 40))
    return (
        f"In a sale the price of {goods}, {p} dollars each, is cut by {off} percent. "
        f"What does {name} have to pay for {n} of them?"
    ), n * p * (100 - off) // 100  # p is a multiple of 20 and off of 5


def _distance(rng: random.Random) -> tuple[str, int]:
    place, v, t = rng.choice(_PLACES), 5 * rng.randint(12, 40), rng.randint(2, 9)
    h = rng.randint(5, 12)
    return (
        f"A train leaves {place} at {h} o'clock and keeps a speed of {v} kilometers per hour. "
        f"How many kilometers from {place} is it after {t} hours?"
    ), v * t


def _meeting(rng: random.Random) -> tuple[str, int]:
    (a, b), t = rng.sample(_PLACES, 2), rng.randint(2, 8)
    v, w = 5 * rng.randint(10, 30), 5 * rng.randint(10, 30)
    return (
        f"{a} and {b} are {t * (v + w)} kilometers apart. At the same moment one train leaves {a} "
        f"for {b} at {v} kilometers per hour, and another leaves {b} for {a} at {w} kilometers "
        "per hour. After how many hours do they meet?"
    ), t


def _speed(rng: random.Random) -> tuple[str, int]:
    (a, b), t, v = rng.sample(_PLACES, 2), rng.randint(2, 9), rng.randint(45, 190)
    name = rng.choice(_NAMES)
    return (
        f"{name} takes the train from {a} to {b}. The line is {t * v} kilometers long and the "
        f"ride takes {t} hours. What is the average speed in kilometers per hour?"
    ), v


def _seats(rng: random.Random) -> tuple[str, int]:
    (a, b), cars, seats = rng.sample(_PLACES, 2), rng.randint(3, 9), 4 * rng.randint(8, 20)
    taken = rng.randint(cars * seats // 3, cars * seats // 2)
    out, on = rng.randint(5, taken // 2), rng.randint(5, cars * seats // 3)
    return (
        f"A train has {cars} cars with {seats} seats each. When it leaves {a}, {taken} passengers "
        f"have a seat. In {b}, {out} of them get off and {on} people get on. How many seats are "
        f"free after {b}, if everyone sits?"
    ), cars * seats - taken + out - on


def _chase(rng: random.Random) -> tuple[str, int]:
    place, t, h = rng.choice(_PLACES), rng.randint(2, 6), rng.randint(2, 4)
    # The express is faster by d; it catches up after t hours if v * h == d * t.
    unit = 5 * rng.randint(3, 8)
    v, d = unit * t, unit * h
    return (
        f"A freight train leaves {place} at {v} kilometers per hour. {h} hours later an express "
        f"train follows on the same line at {v + d} kilometers per hour. How many hours does the "
        "express train need to catch up?"
    ), t


def _older(rng: random.Random) -> tuple[str, int]:
    (a, b), age = rng.sample(_NAMES, 2), rng.randint(4, 30)
    d, n = rng.randint(2, 20), rng.randint(2, 15)
    return (
        f"{a} is {age} years old, and {b} is {d} years older than {a}. "
        f"How old will {b} be in {n} years?"
    ), age + d + n


def _together(rng: random.Random) -> tuple[str, int]:
    (a, b), k, age = rng.sample(_NAMES, 2), rng.randint(2, 5), rng.randint(3, 16)
    times = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    return (
        f"{a} is {times} as old as {b}. The sum of their ages is {(k + 1) * age}. How old is {a}?"
    ), k * age


def _ago(rng: random.Random) -> tuple[str, int]:
    (a, b), k, n = rng.sample(_NAMES, 2), rng.randint(2, 4), rng.randint(2, 10)
    age = n + rng.randint(3, 14)
    times = {2: "twice", 3: "three times", 4: "four times"}[k]
    return (
        f"Today {b} is {age}. {n} years ago, {a} was {times} as old as {b} was then. "
        f"What is {a}'s age today?"
    ), k * (age - n) + n


def _three(rng: random.Random) -> tuple[str, int]:
    (a, b, c), age = rng.sample(_NAMES, 3), rng.randint(10, 40)
    d, e = rng.randint(1, 9), rng.randint(1, 8)
    return (
        f"The ages of {a}, {b} and {c} add up to {3 * age + d - e}. {b} is {d} years older than "
        f"{a}, while {c} is {e} years younger than {a}. How old is {a}?"
    ), age


def _double(rng: random.Random) -> tuple[str, int]:
    (a, b), child = rng.sample(_NAMES, 2), rng.randint(3, 15)
    n = rng.randint(20, 38) - child  # the age at the child's birth, less the child's
    return (
        f"{a} is {2 * child + n} years old and has a child, {b}, who is {child}. "
        f"In how many years will {a} be exactly twice as old as {b}?"
    ), n


FORMS: dict[str, Form] = {
    "shop/basket": _basket,
    "shop/change": _change,
    "shop/stock": _stock,
    "shop/takings": _takings,
    "shop/sale": _sale,
    "train/distance": _distance,
    "train/meeting": _meeting,
    "train/speed": _speed,
    "train/seats": _seats,
    "train/chase": _chase,
    "age/older": _older,
    "age/together": _together,
    "age/ago": _ago,
    "age/three": _three,
    "age/double": _double,
}


def word_problems(count: int = 200, seed: int = 0) -> list[WordProblem]:
    """`count` different problems, the forms in turn; the same arguments give the same ones."""
    rng = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    forms = list(FORMS.items())
    while len(problems) < count:
        number = len(problems)
        name, form = forms[number % len(forms)]
        text, answer = form(rng)
        if text not in problems:
            problem = WordProblem(f"{name}/{number}", text + rng.choice(_ENDINGS), answer)
            problems[text] = problem
    return list(problems.values())
