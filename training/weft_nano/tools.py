"""A dozen everyday tools: their schemas, and for each a maker of request, call, result and answer.

Knows nothing of dialogues. Tools made up on the spot are in `invented`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.weft_nano import entities
from training.weft_nano.entities import KINDS, Source

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool: what the user says, the call, what comes back, what the assistant then says."""

    ask: str
    arguments: dict[str, Any]
    result: Any
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    schema: Schema
    use: Callable[[Source], Use]

    @property
    def name(self) -> str:
        return str(self.schema["name"])


def schema(name: str, description: str, properties: dict[str, Schema], required: list[str]) -> Schema:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


def text(description: str = "") -> Schema:
    return {"type": "string", "description": description} if description else {"type": "string"}


def options(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def _number(s: Source) -> int | float:
    def make() -> str:
        return f"{s.between(1, 999)}.{s.between(1, 99)}" if s.chance(0.4) else s.digits(1, 4).lstrip("0") or "5"

    value = s.fresh(make)
    return float(value) if "." in value else int(value)


def _weather(s: Source) -> Use:
    place, degrees = entities.city(s), s.between(-9, 38)
    sky = s.choice("sunny cloudy rainy windy foggy clear stormy snowy".split())
    ask = s.choice((
        "What is the weather in {p}?", "How is the weather in {p}?", "What's the weather like in {p}?",
        "Weather in {p}?", "Is it warm in {p}?", "Do I need an umbrella in {p}?", "Check the weather in {p}.",
    ))  # fmt: skip
    arguments: dict[str, Any] = {"city": place}
    if s.chance(0.3):
        arguments["unit"] = s.choice(("celsius", "fahrenheit"))
        ask = ask[:-1] + f" in {arguments['unit']}" + ask[-1]
    result = {"temperature": degrees, "sky": sky}
    return Use(ask.format(p=place), arguments, result, f"It is {degrees} degrees and {sky} in {place}.")


def _calculate(s: Source) -> Use:
    a, b = int(s.fresh(lambda: str(s.between(2, 9999)))), s.between(2, 999)
    sign, word = s.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    ask = s.choice((
        f"What is {a} {word} {b}?", f"Calculate {a} {sign} {b}.", f"How much is {a} {sign} {b}?",
        f"Please compute {a} {word} {b}.", f"{a} {sign} {b} = ?", f"What is {a} {sign} {b}?",
    ))  # fmt: skip
    return Use(ask, {"expression": f"{a} {sign} {b}"}, {"result": result}, f"{a} {word} {b} is {result}.")


def _create_event(s: Source) -> Use:
    title = s.choice("lunch dinner meeting call workout review interview".split())
    if s.chance(0.6):
        title = f"{title} with {entities.first_name(s)}"
    day, at = entities.date(s), entities.moment(s)
    arguments: dict[str, Any] = {"title": title, "date": day, "time": at}
    ask = s.choice((
        "Put {t} on {d} at {a} in my calendar", "Schedule {t} on {d} at {a}", "Create an event: {t}, {d}, {a}",
        "Book {t} for {d} at {a}", "Add {t} on {d} at {a} to my calendar",
    )).format(t=title, d=day, a=at)  # fmt: skip
    if s.chance(0.3):
        arguments["minutes"] = s.choice((15, 20, 30, 45, 60, 90))
        ask += f" for {arguments['minutes']} minutes"
    return Use(ask + ".", arguments, {"status": "created"}, f"Done. I put {title} on {day} at {at} in your calendar.")


def _search_web(s: Source) -> Use:
    topic = s.choice((
        "history of {}", "{} hotel", "best food in {}", "{} museum", "news about {}", "{}", "trains to {}",
    ))  # fmt: skip
    query = topic.format(entities.city(s))
    ask = s.choice((
        "Search the web for {q}.", "Look up {q}.", "Search for {q}.", "Can you google {q}?", "Find {q} online.",
    ))  # fmt: skip
    title = f"{s.word()} {s.choice(('Guide', 'Daily', 'Times', 'Wiki'))}"
    return Use(ask.format(q=query), {"query": query}, [{"title": title}], f"The first result is {title}.")


def _add_note(s: Source) -> Use:
    verb = s.choice("buy call email visit pay fix find meet thank".split())
    note = f"{verb} {s.choice((s.word(), entities.first_name(s), 'the ' + s.choice(entities.ANIMALS)))}"
    ask = s.choice((
        "Make a note: {n}.", "Note down: {n}.", "Add a note: {n}.", "Save this note: {n}.", "Add {n} to my notes.",
    ))  # fmt: skip
    number = int(s.fresh(lambda: str(s.between(1, 999))))
    return Use(ask.format(n=note), {"text": note}, {"id": number}, f"I saved note {number}: {note}.")


def _convert_units(s: Source) -> Use:
    value, result = _number(s), _number(s)
    pairs = (("miles", "kilometers"), ("pounds", "kilograms"), ("feet", "meters"), ("inches", "centimeters"))
    a, b = s.choice(pairs)
    if s.chance(0.5):
        a, b = b, a
    ask = s.choice(("Convert {v} {a} to {b}.", "How many {b} are {v} {a}?", "What is {v} {a} in {b}?"))
    arguments = {"value": value, "from_unit": a, "to_unit": b}
    return Use(ask.format(v=value, a=a, b=b), arguments, {"result": result}, f"{value} {a} are {result} {b}.")


def _convert_currency(s: Source) -> Use:
    amount, result = _number(s), _number(s)
    a, b = s.rng.sample(("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "INR", "CAD"), 2)
    ask = s.choice((
        "Convert {v} {a} to {b}.", "How much is {v} {a} in {b}?", "What is {v} {a} in {b}?", "Change {v} {a} into {b}.",
    ))  # fmt: skip
    arguments = {"amount": amount, "from": a, "to": b}
    return Use(ask.format(v=amount, a=a, b=b), arguments, {"amount": result}, f"{amount} {a} is {result} {b}.")


def _set_timer(s: Source) -> Use:
    minutes = s.between(1, 180)
    arguments: dict[str, Any] = {"minutes": minutes}
    ask = s.choice((
        "Set a timer for {m} minutes", "Start a timer of {m} minutes", "Wake me in {m} minutes", "Timer, {m} minutes",
    )).format(m=minutes)  # fmt: skip
    if s.chance(0.3):
        arguments["label"] = s.choice("tea pasta laundry break cake nap rice".split())
        ask += f" for the {arguments['label']}"
    return Use(ask + ".", arguments, {"status": "running"}, f"The timer runs for {minutes} minutes.")


def _track_order(s: Source) -> Use:
    order = entities.code(s)
    state = s.choice("shipped delivered delayed packed cancelled waiting".split())
    ask = s.choice((
        "Where is my order {o}?", "Track order {o}.", "What is the status of order {o}?", "Has order {o} arrived?",
    ))  # fmt: skip
    result: dict[str, Any] = {"status": state}
    answer = f"Order {order} is {state}."
    if state in ("shipped", "delayed"):
        result["arrives"] = entities.date(s)
        answer = f"Order {order} is {state} and arrives on {result['arrives']}."
    return Use(ask.format(o=order), {"order_id": order}, result, answer)


def _read_file(s: Source) -> Use:
    folder = s.choice(("", "docs/", "src/", "data/", "/tmp/", "notes/"))
    path = folder + s.word().lower() + s.choice((".txt", ".md", ".py", ".json", ".csv"))
    ask = s.choice(("Read the file {p}.", "Open {p}.", "What is in {p}?", "Show me {p}.", "What does {p} say?"))
    line = s.choice(("{} is ready", "{} failed", "call {}", "the key is {}", "ask {}"))
    line = line.format(s.choice((s.word(), entities.code(s))))
    return Use(ask.format(p=path), {"path": path}, line, f"The file says: {line}")


def _find_contact(s: Source) -> Use:
    name, field = s.choice((entities.first_name, KINDS["person"]))(s), s.choice(("phone", "email"))
    found = KINDS[field](s)
    ask = s.choice(("What is {n}'s {f}?", "Find the {f} of {n}.", "I need the {f} of {n}.", "Look up {n}'s {f}."))
    word = "phone number" if field == "phone" else "email address"
    arguments = {"name": name, "field": field}
    return Use(ask.format(n=name, f=word), arguments, {field: found}, f"The {word} of {name} is {found}.")


def _send_message(s: Source) -> Use:
    name = entities.first_name(s)
    body = s.choice((
        "I am late", "see you at {}", "please call me", "the code is {}", "we meet at {}", "happy birthday",
        "thank you",
    ))  # fmt: skip
    body = body.format(s.choice((entities.moment, entities.code, entities.city))(s))
    arguments: dict[str, Any] = {"to": name, "text": body}
    ask = s.choice(("Send {n} a message: {b}", "Tell {n}: {b}", "Write to {n}: {b}", "Message {n}: {b}"))
    ask = ask.format(n=name, b=body)
    if s.chance(0.25):
        arguments["urgent"] = True
        ask += ". It is urgent"
    return Use(ask + ".", arguments, {"sent": True}, f"I sent the message to {name}.")


CATALOGUE: tuple[Tool, ...] = (
    Tool(schema("get_weather", "Get the weather in a city.",
                {"city": text("Name of the city"), "unit": options("celsius", "fahrenheit")}, ["city"]), _weather),
    Tool(schema("calculate", "Calculate an arithmetic expression.",
                {"expression": text()}, ["expression"]), _calculate),
    Tool(schema("create_event", "Add an event to the calendar.",
                {"title": text(), "date": text("YYYY-MM-DD"), "time": text("HH:MM"), "minutes": INTEGER},
                ["title", "date", "time"]), _create_event),
    Tool(schema("search_web", "Search the web.", {"query": text("What to search for")}, ["query"]), _search_web),
    Tool(schema("add_note", "Save a note.", {"text": text()}, ["text"]), _add_note),
    Tool(schema("convert_units", "Convert a value between units.",
                {"value": NUMBER, "from_unit": text(), "to_unit": text()},
                ["value", "from_unit", "to_unit"]), _convert_units),
    Tool(schema("convert_currency", "Convert an amount of money.",
                {"amount": NUMBER, "from": text(), "to": text()}, ["amount", "from", "to"]), _convert_currency),
    Tool(schema("set_timer", "Start a timer.", {"minutes": INTEGER, "label": text()}, ["minutes"]), _set_timer),
    Tool(schema("track_order", "Get the status of an order.", {"order_id": text()}, ["order_id"]), _track_order),
    Tool(schema("read_file", "Read a file.", {"path": text("Path of the file")}, ["path"]), _read_file),
    Tool(schema("find_contact", "Find the phone or email of a person.",
                {"name": text(), "field": options("phone", "email")}, ["name", "field"]), _find_contact),
    Tool(schema("send_message", "Send a message to a person.",
                {"to": text(), "text": text(), "urgent": BOOLEAN}, ["to", "text"]), _send_message),
)  # fmt: skip
