"""Facts as people tell them and ask for them: a key, a value, and the words around both.

Knows phrasings only; where a fact stands in a dialogue is decided in `dialogues`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from training.weft_nano import entities
from training.weft_nano.entities import KINDS, Source


@dataclass(frozen=True, slots=True)
class Fact:
    statement: str
    question: str
    answer: str
    value: str
    kind: str


# attribute -> kind of its value
ATTRIBUTES = {
    "locker code": "code", "door code": "pin", "pin": "pin", "badge number": "code", "seat": "code",
    "flight number": "code", "flight": "code", "room number": "pin", "hotel": "name", "phone number": "phone",
    "extension": "pin", "email address": "email", "password": "passphrase", "passphrase": "passphrase",
    "birthday": "birthday", "home town": "city", "address": "street", "office": "code", "desk": "code",
    "manager": "person", "dentist": "person", "doctor": "person", "brother": "name", "sister": "name",
    "best friend": "person", "boss": "person", "dog": "name", "cat": "name", "pet": "animal", "boat": "name",
    "favourite colour": "colour", "favorite color": "colour", "favourite food": "food", "favourite city": "city",
    "favourite animal": "animal", "favourite number": "count", "lucky number": "count", "job": "job",
    "company": "name", "team": "name", "project": "name", "school": "name", "street": "street", "city": "city",
    "budget": "price", "salary": "count", "rent": "price", "order number": "code", "customer number": "code",
    "account number": "pin", "ticket": "code", "ticket number": "code", "licence plate": "code",
    "appointment": "time", "train": "time", "deadline": "date", "holiday": "date", "day off": "day",
    "username": "name", "nickname": "name", "wifi password": "passphrase", "bike code": "pin", "height": "count",
}  # fmt: skip

# thing -> what can be said of it
THINGS = {
    "code": ("vault safe box garage gate door drawer alarm suitcase server archive cabin lab", "pin code"),
    "password": ("server database router laptop archive printer account wifi project", "passphrase code"),
    "secret word": ("club game day house lab team", "name passphrase"),
    "secret number": ("game day house club lab", "count pin"),
    "name": ("project ship hotel server captain village river restaurant client robot product book", "name"),
    "price": ("car ticket lamp boat house phone table bike chair book camera", "price count"),
    "colour": ("car door house folder flag boat box badge lamp key", "colour"),
    "owner": ("car house boat dog shop hotel company account", "person name"),
    "number": ("room bus track invoice order ticket house gate platform case", "pin code count"),
    "deadline": ("report project order invoice task release budget contract", "date birthday day"),
    "time": ("meeting train flight lunch call dinner party concert demo", "time"),
    "place": ("meeting party concert demo workshop dinner", "city street"),
    "port": ("server database gateway cache proxy", "pin count"),
    "version": ("app library driver server model release", "code count"),
    "budget": ("project team trip party campaign release", "price count"),
    "leader": ("project team group club expedition", "person name"),
}  # fmt: skip

# statement, question, answer, kind; {w} is a person
RELATIONS = (
    ("My name is {v}.", "What is my name?", "Your name is {v}.", "name"),
    ("Hi, I am {v}.", "What is my name?", "Your name is {v}.", "name"),
    ("I'm {v}.", "Who am I?", "You are {v}.", "person"),
    ("I live in {v}.", "Where do I live?", "You live in {v}.", "city"),
    ("I work at {v}.", "Where do I work?", "You work at {v}.", "name"),
    ("I was born in {v}.", "Where was I born?", "You were born in {v}.", "city"),
    ("I work as a {v}.", "What is my job?", "You work as a {v}.", "job"),
    ("I have {v}.", "What pet do I have?", "You have {v}.", "animal"),
    ("My dog is called {v}.", "What is my dog called?", "Your dog is called {v}.", "name"),
    ("My cat is called {v}.", "What is my cat called?", "Your cat is called {v}.", "name"),
    ("I parked in spot {v}.", "Where did I park?", "You parked in spot {v}.", "code"),
    ("My favourite colour is {v}.", "Which colour do I like best?", "Your favourite colour is {v}.", "colour"),
    ("My train leaves at {v}.", "When does my train leave?", "Your train leaves at {v}.", "time"),
    ("My flight is {v}.", "Which flight do I take?", "Your flight is {v}.", "code"),
    ("{w} lives in {v}.", "Where does {w} live?", "{w} lives in {v}.", "city"),
    ("{w} works at {v}.", "Where does {w} work?", "{w} works at {v}.", "name"),
    ("{w} was born in {v}.", "Where was {w} born?", "{w} was born in {v}.", "city"),
    ("{w} works as a {v}.", "What does {w} do for a living?", "{w} works as a {v}.", "job"),
    ("{w} has {v}.", "What pet does {w} have?", "{w} has {v}.", "animal"),
    ("{w} arrives at {v}.", "When does {w} arrive?", "{w} arrives at {v}.", "time"),
    ("{w} likes {v}.", "What does {w} like?", "{w} likes {v}.", "food"),
    ("{w} paid {v} dollars.", "How much did {w} pay?", "{w} paid {v} dollars.", "price"),
    ("{w} is married to {v}.", "Who is {w} married to?", "{w} is married to {v}.", "person"),
    ("{w} has {v} points.", "How many points does {w} have?", "{w} has {v} points.", "count"),
    ("{w} sits in room {v}.", "Which room does {w} sit in?", "{w} sits in room {v}.", "code"),
)

STATEMENTS = (
    "{k} is {v}.", "{k} is {v}.", "{k} is {v}.", "Remember that {k} is {v}.", "Remember: {k} is {v}.",
    "Please remember that {k} is {v}.", "Please remember: {k} is {v}.", "Please note that {k} is {v}.",
    "Note: {k} is {v}.", "Keep in mind that {k} is {v}.", "By the way, {k} is {v}.", "{k}: {v}.", "{k} = {v}",
    "For later, {k} is {v}.", "You should know that {k} is {v}.", "I want you to remember that {k} is {v}.",
    "Don't forget that {k} is {v}.", "It is important that you know {k}. It is {v}.", "I set {k} to {v}.",
)  # fmt: skip
QUESTIONS = (
    "What is {k}?", "What is {k}?", "What's {k}?", "Do you remember {k}?", "Tell me {k}.", "Please tell me {k}.",
    "Can you tell me {k}?", "Can you remind me of {k}?", "Remind me, what is {k}?", "What was {k} again?",
    "What was {k}?", "I forgot {k}. What is it?", "And {k}?", "{k}?", "What did I say {k} was?",
    "Could you tell me what {k} is?", "I need {k}.", "Earlier I told you {k}. What is it?", "Give me {k}.",
    "Do you know {k}?", "Now, what is {k}?", "Quick question: what is {k}?",
)  # fmt: skip


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _keyed(s: Source, told: str, asked: tuple[str, str], kind: str) -> Fact:
    """`asked` is the key in the question and in the answer; it may be put otherwise than when it was told."""
    value = KINDS[kind](s)
    return Fact(
        statement=_sentence(s.choice(STATEMENTS).format(k=told, v=value)),
        question=_sentence(s.choice(QUESTIONS).format(k=asked[0])),
        answer=_sentence(f"{asked[1]} is {value}."),
        value=value,
        kind=kind,
    )


def _owned(s: Source) -> Fact:
    attribute = s.choice(tuple(ATTRIBUTES))
    kind = ATTRIBUTES[attribute]
    if s.chance(0.45):
        return _keyed(s, f"my {attribute}", (f"my {attribute}", f"your {attribute}"), kind)
    owner = entities.first_name(s)
    key = f"{owner}'s {attribute}"
    return _keyed(s, f"the {attribute} of {owner}" if s.chance(0.15) else key, (key, key), kind)


def _of_a_thing(s: Source) -> Fact:
    attribute = s.choice(tuple(THINGS))
    things, kinds = THINGS[attribute]
    thing = s.choice(things.split())
    if s.chance(0.25):
        thing = f"{s.choice(entities.COLOURS)} {thing}"
    key = f"the {attribute} of the {thing}"
    told = asked = s.choice((key, f"the {thing} {attribute}"))
    if s.chance(0.25):
        told = s.choice((key, f"the {thing} {attribute}", f"the {thing}'s {attribute}"))
    return _keyed(s, told, (asked, asked), s.choice(kinds.split()))


def _bare(s: Source) -> Fact:
    """Keys that mean nothing, so that only looking them up helps."""
    noun = s.choice("code number password value word name key token label id city".split())
    made_up = s.word()
    shapes = (f"the {noun} for {made_up}", f"the {noun} of {made_up}", f"{made_up}'s {noun}", f"the {noun}", made_up)
    key = s.choice(shapes)
    return _keyed(s, key, (key, key), s.choice(("name", "code", "pin", "count", "passphrase", "person")))


def _relation(s: Source) -> Fact:
    statement, question, answer, kind = s.choice(RELATIONS)
    value, who = KINDS[kind](s), entities.first_name(s)
    return Fact(statement.format(v=value, w=who), question.format(w=who), answer.format(v=value, w=who), value, kind)


MAKERS: tuple[tuple[Callable[[Source], Fact], float], ...] = (
    (_owned, 0.4), (_of_a_thing, 0.25), (_relation, 0.2), (_bare, 0.15),
)  # fmt: skip


def _key_of(fact: Fact) -> str:
    """The same for "the car colour" and "the colour of the car"."""
    words = fact.answer.replace(fact.value, "").lower().replace(" of ", " ").replace("the ", " ").split()
    return " ".join(sorted(words))


def make_fact(s: Source, keys_taken: set[str]) -> Fact:
    """A fact whose key nobody in this dialogue has used; the key is taken from then on."""
    while True:
        (maker,) = s.rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])
        fact = maker(s)
        key = _key_of(fact)
        if key not in keys_taken:
            keys_taken.add(key)
            return fact
