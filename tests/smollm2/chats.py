"""55 conversations: languages, code, lists, numbers, system prompts and several turns."""

from __future__ import annotations

Message = dict[str, str]
# Each line is a conversation: the user and the assistant in turn, after a system prompt that follows "system".
LINES: tuple[tuple[str, ...], ...] = (
    ("What is the capital of France?",),
    ("Who wrote the play Hamlet, and when?",),
    ("Explain photosynthesis in two sentences.",),
    ("Give me a list of five fruits.",),
    ("List the planets of the solar system, one per line, numbered.",),
    ("Write a haiku about autumn.",),
    ("Tell me a joke about a cat.",),
    ("Why is the sky blue?",),
    ("What is the difference between a virus and a bacterium?",),
    ("Summarize the story of Cinderella in three sentences.",),
    ("How do I boil an egg?",),
    ("Name three uses of baking soda.",),
    ("What should I pack for a weekend at the sea?",),
    ("Write a short e-mail that asks a colleague to move a meeting from Monday to Tuesday.",),
    ("Translate to French: The weather is nice today.",),
    ("Translate to German: I would like a cup of coffee, please.",),
    ("Write a Python function that returns the factorial of n.",),
    ("Write a Python function `is_prime(n)` with a docstring.\n\n```python\ndef is_prime(n):\n```",),
    ("What does this do?\n\n```c\nfor (int i = 0; i < 10; ++i) {\n    sum += a[i];\n}\n```",),
    ("Write an SQL query that counts the rows of the table `orders` for each customer.",),
    ("Fix this JavaScript: `const x = [1, 2, 3;`",),
    ("Write a regular expression that matches a date such as 2024-11-30.",),
    ("Write a bash command that finds all files larger than 100 MB.",),
    ("Return a JSON object with the keys name and age for Bob, who is 42.",),
    ("Convert this to a Markdown table: apple 1.20, pear 0.95, plum 2.00",),
    ("What is 12 + 30?",),
    ("What is 17 * 23? Think step by step.",),
    ("Which number comes next: 2, 4, 8, 16, 32?",),
    ("How many seconds are in 3 hours and 15 minutes?",),
    ("Round 3.14159265358979 to 2 decimal places.",),
    ("My order 4821-0093-77 was placed on 2024-02-29 at 23:59:59. Repeat its number.",),
    ("Sort these numbers: 100, 9, 1000, 99, 10, 90",),
    ("Wie heißt die Hauptstadt von Österreich?",),
    ("Schreibe einen kurzen Satz über große Bäume.",),
    ("Quelle est la capitale de l'Italie ? Réponds en une phrase.",),
    ("¿Cuántos días tiene un año bisiesto?",),
    ("日本の首都はどこですか？",),  # noqa: RUF001
    ("用一句话介绍长城。",),
    ("Столица России?",),
    ("ما هي عاصمة مصر؟",),
    ("भारत की राजधानी क्या है?",),
    ("Hello! 👋 How are you today? 😀",),
    ("  What   does\tthis  odd   spacing\n\n\n mean?  ",),
    ("ok",),
    ("?",),
    ("system", "You are a pirate. Always answer like one.", "Where is the treasure?"),
    ("system", "Answer with one word only.", "What colour is grass?"),
    ("system", "You are a helpful teacher for children of eight years.", "What is gravity?"),
    ("system", "", "Say hello."),
    ("My name is Ada.", "Nice to meet you, Ada!", "What is my name?"),
    ("Remember the number 731.", "I will remember 731.", "Which number did I tell you?"),
    ("Name a mammal.", "A dog.", "Another one.", "A whale.", "And one that flies?"),
    ("system", "You write short answers.", "What is 2 + 2?", "4", "And times ten?"),
    ("Write a poem about the moon.", "The moon is bright,\nIt shines at night.", "Now make it sad, with four lines."),
    ("Here is a text. " + "The quick brown fox jumps over the lazy dog. " * 40 + "\nWhich animal jumps?",),
)


def messages(line: tuple[str, ...]) -> list[Message]:
    """Return a line of LINES as messages of a chat."""
    found: list[Message] = []
    if line[0] == "system":
        found.append({"role": "system", "content": line[1]})
        line = line[2:]
    for number, text in enumerate(line):
        found.append({"role": ("user", "assistant")[number % 2], "content": text})
    return found


CHATS = [messages(line) for line in LINES]
