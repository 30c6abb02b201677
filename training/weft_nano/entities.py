"""Random values for dialogues: names, places, codes, times. Each is made anew, so a model can only copy it.

Knows the split: a value whose checksum is 0 modulo 8 appears in held-out dialogues only, any other in training
only. Knows nothing of dialogues.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z".split()
VOWELS = "a e i o u a e i o ai ea oo ie".split()
CODAS = " n r l s m x k th nd ck st  ".split(" ")
FIRST_NAMES = (
    "Ada Alice Amir Anna Ben Bob Carla Chen Clara Daniel David Diego Elena Emma Eric Eva Farid Felix Fiona Grace "
    "Hana Hugo Ida Ivan Jack Jane Jonas Julia Karim Kate Laura Leo Lena Linda Lucas Mara Maria Mark Mia Mina Nadia "
    "Nina Noah Nora Olga Omar Oscar Paul Peter Priya Rita Rosa Ruth Sam Sara Simon Sofia Tara Theo Tom Vera Yuki Zoe"
).split()
CITIES = (
    "Amsterdam Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Istanbul Kyoto Lagos Lima "
    "Lisbon London Madrid Miami Milan Mumbai Nairobi Oslo Paris Porto Prague Rome Seoul Sydney Tokyo Toronto Vienna"
).split()
COLOURS = "red blue green yellow purple orange white black silver golden brown pink grey teal violet amber".split()
ANIMALS = "cat dog horse parrot rabbit turtle hamster goat pony falcon otter fox owl heron lizard duck".split()
FOODS = "pizza pasta soup sushi curry salad tacos rice noodles pancakes bread cheese stew dumplings apples".split()
JOBS = "teacher doctor pilot baker painter lawyer nurse plumber writer chemist farmer judge tailor singer".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def is_held_out(value: str) -> bool:
    return zlib.crc32(value.encode()) % 8 == 0


@dataclass(slots=True)
class Source:
    """Draws values for one side of the split."""

    rng: random.Random
    held_out: bool = False

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def fresh(self, make: Callable[[], str]) -> str:
        """A value from `make` that belongs to this side of the split."""
        while True:
            value = make()
            if is_held_out(value) == self.held_out:
                return value

    def invent(self) -> str:
        syllables = 2 if self.chance(0.75) else 3
        parts = [self.choice(ONSETS) + self.choice(VOWELS) for _ in range(syllables)]
        return ("".join(parts) + self.choice(CODAS)).capitalize()

    def word(self) -> str:
        return self.fresh(self.invent)

    def digits(self, low: int, high: int) -> str:
        return "".join(str(self.between(0, 9)) for _ in range(self.between(low, high)))

    def letters(self, count: int) -> str:
        return "".join(self.choice(LETTERS) for _ in range(count))


def first_name(s: Source) -> str:
    return s.choice(FIRST_NAMES) if s.chance(0.5) else s.word()


def city(s: Source) -> str:
    return s.choice(CITIES) if s.chance(0.3) else s.word()


def code(s: Source) -> str:
    def make() -> str:
        shape = s.between(0, 3)
        if shape == 0:
            return f"{s.letters(2)}-{s.digits(3, 4)}"
        if shape == 1:
            return f"{s.letters(1)}{s.digits(2, 5)}"
        if shape == 2:
            return f"{s.digits(2, 3)}-{s.letters(2)}-{s.digits(1, 2)}"
        return f"{s.letters(3)}{s.digits(2, 3)}"

    return s.fresh(make)


def moment(s: Source) -> str:
    return s.fresh(lambda: f"{s.between(0, 23):02d}:{s.between(0, 59):02d}")


def date(s: Source) -> str:
    return s.fresh(lambda: f"20{s.between(20, 39)}-{s.between(1, 12):02d}-{s.between(1, 28):02d}")


def animal(s: Source) -> str:
    return f"a {s.choice(COLOURS)} {s.choice(ANIMALS)}"


KINDS: dict[str, Callable[[Source], str]] = {
    "name": Source.word,
    "person": lambda s: s.fresh(lambda: f"{s.choice(FIRST_NAMES)} {s.invent()}"),
    "city": Source.word,
    "code": code,
    "pin": lambda s: s.fresh(lambda: s.digits(3, 6)),
    "count": lambda s: s.fresh(lambda: str(s.between(10, 9999))),
    "price": lambda s: s.fresh(lambda: f"{s.between(2, 999)}.{s.between(0, 99):02d}"),
    "time": moment,
    "date": date,
    "day": lambda s: s.choice(DAYS),
    "birthday": lambda s: s.fresh(lambda: f"{s.choice(MONTHS)} {s.between(1, 28)}"),
    "colour": lambda s: s.choice(COLOURS),
    "animal": animal,
    "food": lambda s: s.choice(FOODS),
    "job": lambda s: s.choice(JOBS),
    "email": lambda s: s.fresh(lambda: f"{s.invent().lower()}@{s.invent().lower()}.com"),
    "street": lambda s: s.fresh(lambda: f"{s.between(1, 199)} {s.invent()} Street"),
    "phone": lambda s: s.fresh(lambda: f"{s.digits(3, 3)}-{s.digits(4, 4)}"),
    "passphrase": lambda s: s.fresh(lambda: f"{s.choice(COLOURS)} {s.choice(ANIMALS)} {s.digits(2, 2)}"),
}

# Kinds drawn from short lists: their values are shared by both sides of the split.
CLOSED_KINDS = frozenset({"day", "colour", "animal", "food", "job"})
