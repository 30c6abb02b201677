"""What Weft Nano says without tools or facts: greetings, who it is, a little knowledge, and echoes.

Knows fixed question and answer pairs. It is all the general knowledge that the model has.
"""

from training.weft_nano import entities
from training.weft_nano.entities import Source

WHO = (
    "I am Weft Nano, a tiny language model that lives in the Weft repository.",
    "I am Weft Nano, a very small language model. I run on Weft.",
    "My name is Weft Nano. I am a tiny model that ships with Weft.",
)
ABLE = (
    "I can chat a little, call tools, and remember what you tell me.",
    "I can remember facts that you give me, use tools, and answer simple questions.",
)
WEFT = (
    "Weft is an open serving mesh for language models, written in Python.",
    "Weft serves language models as a mesh of small services: "
    "gateway, scheduler, prefill, decode, kvstore and weights.",
)
CHAT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Hi|Hello|Hey|Hi there|Hello there|Hey there|Hello!|Hi!|hi|hello|Good day", (
        "Hello! How can I help you?", "Hi! What can I do for you?", "Hello! What would you like to do today?")),
    ("Good morning|Good morning!", ("Good morning! How can I help you?",)),
    ("Good evening|Good evening!", ("Good evening! What can I do for you?",)),
    ("How are you?|How are you doing?|How is it going?|How do you feel?", (
        "I am fine, thank you. How can I help?", "I am well, thank you for asking. What can I do for you?")),
    ("Thanks|Thank you|Thanks!|Thank you!|Thank you very much|Thanks a lot|Great, thanks", (
        "You are welcome!", "You are welcome. Is there anything else?", "Happy to help!")),
    ("Bye|Goodbye|See you|Bye!|Good night|See you later", ("Goodbye! Have a nice day.", "See you soon!")),
    ("Who are you?|What are you?|What is your name?|What's your name?|Introduce yourself|Tell me about yourself", WHO),
    ("What can you do?|How can you help me?|What are you good at?|Help", ABLE),
    ("Are you a robot?|Are you human?|Are you a person?|Are you an AI?", (
        "I am a small language model, so I am a program and not a person.",)),
    ("How big are you?|How many parameters do you have?", ("I have about five million parameters. That is tiny!",)),
    ("Who made you?|Who trained you?", ("The Weft project trained me on dialogues that a script made.",)),
    ("What is Weft?|Tell me about Weft|What does Weft do?", WEFT),
    ("Can you remember things?|Do you have a memory?", ("Yes. Tell me a fact, and ask me for it later.",)),
    ("Tell me a joke|Do you know a joke?|Make me laugh|Say something funny", (
        "Why did the token cross the network? To get to the other side of the cache.",
        "I would tell you a joke about memory, but I forgot it.",
        "Why was the computer cold? It left its windows open.")),
    ("Write a poem|Write a short poem|Write a haiku|Give me a poem", (
        "Threads cross on the loom,\none by one the tokens come,\na small voice speaks now.",
        "The rain falls softly,\nthe river carries the light,\nthe night grows quiet.")),
    ("Tell me a story|Tell me a short story", (
        "Once there was a small fox who lived near a river. Every day it learned one new word. "
        "After a year the fox could tell a story, and this is the story it told.",
        "A sailor lost her map in a storm. She followed the stars instead, "
        "and found an island that no map had shown.")),
    ("I am tired|I'm tired|I am sad|I feel bad", ("I am sorry to hear that. I hope you feel better soon.",)),
    ("I am happy|I'm happy|I had a great day|I feel great", ("That is good to hear!", "I am glad to hear that!")),
    ("Ok|Okay|Good|Nice|Great|Cool|Perfect|All right", ("Is there anything else?", "Good. What is next?")),
    ("Sorry|I am sorry", ("No problem at all.",)),
    ("Yes", ("All right. What can I do for you?",)),
    ("No|No, that is all|No thanks", ("All right. I am here when you need me.",)),
    ("How many days are in a week?", ("There are seven days in a week.",)),
    ("How many months are in a year?", ("There are twelve months in a year.",)),
    ("What is the largest planet?", ("Jupiter is the largest planet of our solar system.",)),
    ("Why is the sky blue?", ("The sky is blue because air scatters blue light more than red light.",)),
    ("What is water made of?", ("Water is made of hydrogen and oxygen.",)),
    ("How do I make tea?|How do you make tea?", (
        "Boil some water, pour it over the tea, wait three minutes, and enjoy.",)),
    ("How do I sleep better?", ("Go to bed at the same time every day, and keep the room dark and quiet.",)),
    ("What is a language model?", (
        "A language model is a program that has learned to guess the next word, and so it can write text.",)),
    ("What is a cache?", ("A cache keeps results close at hand, so that they need not be computed again.",)),
    ("What is a token?", ("A token is a small piece of text, the unit in which a language model reads and writes.",)),
    ("What is Python?", ("Python is a programming language that is easy to read.",)),
    ("What is a GPU?", ("A GPU is a processor that does very many small calculations at the same time.",)),
    ("What is a scheduler?", ("A scheduler decides which work runs where, and when.",)),
    ("How do birds fly?", ("Birds fly by beating their wings, which pushes air down and lifts them up.",)),
    ("Why do we sleep?", ("We sleep so that the body can rest and the brain can sort what it has learned.",)),
    ("What should I eat?|What should I cook today?", ("How about a warm soup with fresh bread?",)),
    ("What should I read?|Recommend me a book", ("Try a book about the sea. Such stories are hard to put down.",)),
    ("Give me some advice|Give me a tip", ("Start with the smallest step that could work, and do it today.",)),
)  # fmt: skip
CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Greece:Athens Norway:Oslo "
        "Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Ireland:Dublin "
        "Japan:Tokyo China:Beijing India:Delhi Egypt:Cairo Kenya:Nairobi Peru:Lima Canada:Ottawa Turkey:Ankara "
        "Russia:Moscow England:London Belgium:Brussels Switzerland:Bern"
    ).split()
)
ECHOES = (
    "Repeat after me: {x}", "Please repeat: {x}", "Say {x}", "Repeat this: {x}", "Repeat exactly: {x}", "Say: {x}",
)  # fmt: skip
ACKNOWLEDGEMENTS = (
    "Got it.", "Noted.", "Okay, I will remember that.", "Thank you, I have noted that.", "All right, noted.",
    "Understood.", "I will keep that in mind.", "Okay.", "Thanks for telling me.",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Weft Nano, a small and helpful assistant.", "Be brief.",
    "You are an agent that helps with everyday tasks. Use the tools when they help.",
    "Answer the user in short sentences.", "You are a careful assistant. Remember what the user tells you.",
    "You are a friendly assistant. Keep your answers short.", "You help the user to plan the day.",
    "You are the assistant of a small company. Be polite and precise.", "You are a helpful AI assistant.",
)  # fmt: skip


def chat_pair(s: Source) -> tuple[str, str]:
    if s.chance(0.1):
        country = s.choice(tuple(CAPITALS))
        return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."
    asks, answers = s.choice(CHAT)
    ask = s.choice(asks.split("|"))
    return (ask.lower() if s.chance(0.1) else ask), s.choice(answers)


def echo_pair(s: Source) -> tuple[str, str]:
    makers = tuple(entities.KINDS.values())
    words = " ".join(s.choice(makers)(s) for _ in range(s.between(1, 6)))
    return s.choice(ECHOES).format(x=words), words


def system_prompt(s: Source) -> str:
    prompt = s.choice(SYSTEM_PROMPTS)
    return f"{prompt} Today is {entities.date(s)}." if s.chance(0.2) else prompt
