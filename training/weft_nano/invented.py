"""Tools that nobody has seen before: names, parameters and results drawn at random.

They make the model read the schema in front of it. Knows nothing of dialogues.
"""

from typing import Any

from training.weft_nano import entities, tools
from training.weft_nano.entities import KINDS, Source
from training.weft_nano.tools import Schema, Tool, Use

VERBS = (
    "get find check book open close start stop list create update delete order rent plan print scan lock unlock send "
    "move copy load save count measure share test build deploy restart invite assign rate review cancel confirm"
).split()
NOUNS = (
    "invoice ticket room flight parcel lamp door server job task report backup printer camera playlist song movie "
    "recipe table taxi bike ticket sensor plant robot badge key loan policy claim grade course exam shift stock price "
    "image page branch build queue cluster log alert metric model device garden heater meter account budget"
).split()
# parameter name -> kinds of text values
TEXT_PARAMETERS = {
    "name": "name person", "id": "code", "city": "city", "date": "date", "time": "time", "user": "name",
    "code": "code", "title": "name", "email": "email", "address": "street", "owner": "person",
    "target": "name", "source": "name", "customer": "person", "project": "name", "key": "code",
    "location": "city", "start": "date time", "color": "colour", "phone": "phone", "label": "name colour",
    "destination": "city", "day": "day", "file": "name", "topic": "name",
}  # fmt: skip
INTEGER_PARAMETERS = "count limit quantity days hours level page size seats age year port floor priority".split()
NUMBER_PARAMETERS = "price weight amount length speed width height distance score rate volume".split()
BOOLEAN_PARAMETERS = "urgent public active express dry_run verbose force silent fragile confirmed gift".split()
ENUM_PARAMETERS = {
    "mode": "fast slow safe auto manual eco", "size": "small medium large tiny huge",
    "format": "pdf csv json text html", "status": "open closed pending done failed",
    "kind": "new used basic full light", "quality": "low medium high best",
    "language": "english french german spanish italian", "sort": "newest oldest cheapest nearest",
    "season": "spring summer autumn winter", "period": "day week month year",
    "side": "left right top bottom",
}  # fmt: skip
ERRORS = ("not found", "access denied", "timeout", "invalid id", "service unavailable")


def _parameter(s: Source) -> tuple[str, Schema]:
    draw = s.rng.random()
    if draw < 0.45:
        return s.choice(tuple(TEXT_PARAMETERS)), tools.text()
    if draw < 0.6:
        return s.choice(INTEGER_PARAMETERS), tools.INTEGER
    if draw < 0.7:
        return s.choice(NUMBER_PARAMETERS), tools.NUMBER
    if draw < 0.8:
        return s.choice(BOOLEAN_PARAMETERS), tools.BOOLEAN
    name = s.choice(tuple(ENUM_PARAMETERS))
    words = ENUM_PARAMETERS[name].split()
    return name, tools.options(*s.rng.sample(words, s.between(2, min(4, len(words)))))


def _value(s: Source, name: str, schema: Schema) -> tuple[Any, str]:
    """A value for the parameter, and how the user writes it."""
    if "enum" in schema:
        word = s.choice(schema["enum"])
        return word, word
    if schema["type"] == "integer":
        number = int(s.fresh(lambda: str(s.between(1, 999))))
        return number, str(number)
    if schema["type"] == "number":
        real = float(s.fresh(lambda: f"{s.between(1, 300)}.{s.between(1, 9)}"))
        return real, str(real)
    if schema["type"] == "boolean":
        truth = s.chance(0.6)
        return truth, s.choice(("true", "yes") if truth else ("false", "no"))
    word = KINDS[s.choice(TEXT_PARAMETERS.get(name, "name").split())](s)
    return word, word


def _request(s: Source, action: str, parts: list[tuple[str, str]]) -> str:
    join = s.choice((" {n} {v}", " {n}: {v}", " {n} = {v}", " {n} {v}"))
    details = ",".join(join.format(n=n.replace("_", " "), v=v) for n, v in parts)
    opening = s.choice(("", "Please ", "Can you ", "I want to ", "Now "))
    sentence = f"{opening}{action}{s.choice((',', ' with', ':'))}{details}" if parts else f"{opening}{action}"
    return sentence[0].upper() + sentence[1:] + ("?" if opening == "Can you " else ".")


def _outcome(s: Source, action: str) -> tuple[Any, str]:
    draw = s.rng.random()
    if draw < 0.1:
        error = s.choice(ERRORS)
        return {"error": error}, f"Sorry, that did not work: {error}."
    if draw < 0.35:
        return {"status": "ok"}, f"Done. I did this: {action}."
    field = s.choice(tuple(TEXT_PARAMETERS))
    value = KINDS[s.choice(TEXT_PARAMETERS[field].split())](s)
    if draw < 0.5:
        return {"status": "ok", field: value}, f"Done. The {field} is {value}."
    if draw < 0.7:
        count = int(s.fresh(lambda: str(s.between(1, 9999))))
        name = s.choice(INTEGER_PARAMETERS)
        return {name: count, field: value}, f"The {name} is {count} and the {field} is {value}."
    return {field: value}, f"The {field} is {value}."


def _name(s: Source, verb: str, noun: str) -> str:
    shape = s.between(0, 5)
    if shape == 0:
        return verb + noun.capitalize()
    if shape == 1:
        return f"{noun}_{verb}"
    if shape == 2:
        return f"{s.word().lower()}_{verb}_{noun}"
    return f"{verb}_{noun}"


def invent_tool(s: Source) -> Tool:
    """A tool with zero to four parameters. Its name belongs to this side of the split."""
    while True:
        verb, noun = s.choice(VERBS), s.choice(NOUNS)
        name = _name(s, verb, noun)
        if entities.is_held_out(name) == s.held_out:
            break
    properties = dict(_parameter(s) for _ in range(s.choice((0, 1, 1, 2, 2, 3, 4))))
    required = [p for p in properties if s.chance(0.7)]
    action = f"{verb} {s.choice(('the', 'a'))} {noun}"
    description = s.choice((f"{verb} the {noun}", f"{verb} a {noun}", f"Use this to {verb} a {noun}"))
    description = f"{description.capitalize()}."

    def use(source: Source) -> Use:
        given = [p for p in properties if p in required or source.chance(0.5)]
        if source.chance(0.3):
            source.rng.shuffle(given)
        values = {p: _value(source, p, properties[p]) for p in given}
        # The call lists its arguments in the order of the schema, however the user put them.
        arguments = {p: values[p][0] for p in properties if p in values}
        result, answer = _outcome(source, action)
        return Use(_request(source, action, [(p, values[p][1]) for p in given]), arguments, result, answer)

    return Tool(tools.schema(name, description, properties, required), use)
