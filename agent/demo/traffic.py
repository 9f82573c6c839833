"""The demo's traffic: seeded multi-turn chats in phases. The same seed gives the same sessions, texts,
arrival times and think times; only when a later turn is sent depends on how fast the server answered."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the run. Sizes are in words (1 word is about 1.3 tokens)."""

    name: str
    sessions_per_second: float  # mean arrival rate within the first `arrival_share` of the phase
    arrival_share: float
    turns: int
    first_words: int  # of the first question; the later ones have about 20
    answer_tokens: int
    think_seconds: float  # mean pause between an answer and the next question
    color: str  # in the report


@dataclass(frozen=True, kw_only=True)
class Turn:
    text: str
    answer_tokens: int
    think_seconds: float


@dataclass(frozen=True, kw_only=True)
class Session:
    """One chat: its turns are sent in order, each `think_seconds` after the answer to the one before."""

    number: int
    phase: str
    start_seconds: float  # since the run's start
    system: str
    turns: tuple[Turn, ...]


def _phase(name: str, rate: float, share: float, color: str, **sizes: float) -> Phase:
    defaults = {"turns": 3, "first_words": 30, "answer_tokens": 40, "think_seconds": 2.0}
    return Phase(
        name=name,
        sessions_per_second=rate,
        arrival_share=share,
        color=color,
        **{**defaults, **sizes},  # pyright: ignore[reportArgumentType]
    )


PHASES = (
    _phase("calm", 0.3, 0.9, "#e8f1e8"),
    _phase("burst", 3.0, 0.35, "#fbe9e0", first_words=60),
    _phase("long prompts", 0.8, 0.8, "#e6edf7", turns=4, first_words=380),
    _phase("many sessions", 1.6, 0.8, "#f6eed9", turns=4, first_words=160, think_seconds=3.0),
    _phase("calm again", 0.3, 0.5, "#e8f1e8"),
)

SYSTEM = (
    "You are the assistant of a small workshop. Answer briefly, in plain words, and say when you are unsure."
)
ROLES = (
    "gardener",
    "baker",
    "sailor",
    "carpenter",
    "nurse",
    "teacher",
    "potter",
    "cyclist",
    "printer",
    "beekeeper",
)
THINGS = (
    *(
        "the rain barrel",
        "a sourdough starter",
        "the mainsail",
        "an oak table",
        "a night shift",
        "a class of nine",
    ),
    *(
        "the kiln",
        "a gear hub",
        "the type case",
        "a new hive",
        "the north bed",
        "a copper pan",
        "the workshop door",
    ),
)
CONCERNS = (
    *(
        "leaks a little at the seam",
        "smells sharper than last week",
        "was repaired in a hurry",
        "needs a second coat",
    ),
    *(
        "is heavier than it looks",
        "came without instructions",
        "works well until noon",
        "has to be ready by Friday",
    ),
    *(
        "makes a noise when it turns",
        "costs more than we planned",
        "was left out overnight",
        "is older than I am",
    ),
)
QUESTIONS = (
    *(
        "What should I check first?",
        "How would you explain that to a beginner?",
        "Which tool do I need for it?",
    ),
    *(
        "What could go wrong if I wait?",
        "Can you give me three steps?",
        "How long will it last, do you think?",
    ),
    *(
        "Is there a cheaper way to do it?",
        "What would you write on the label?",
        "Why does that happen at all?",
    ),
)


def make_sessions(phases: tuple[Phase, ...], seconds_per_phase: float, seed: int) -> list[Session]:
    """Sessions in order of their start."""
    rng = random.Random(seed)
    sessions: list[Session] = []
    for index, phase in enumerate(phases):
        start, length = index * seconds_per_phase, phase.arrival_share * seconds_per_phase
        count = max(1, round(phase.sessions_per_second * length))
        arrivals = sorted(start + rng.uniform(0, length) for _ in range(count))
        sessions += [_session(rng, phase, len(sessions) + i, at) for i, at in enumerate(arrivals)]
    return sessions


def _session(rng: random.Random, phase: Phase, number: int, start: float) -> Session:
    role = rng.choice(ROLES)
    system = f"{SYSTEM} You talk to a {role}, customer {rng.randrange(10_000)}."
    words = [phase.first_words] + [20] * (phase.turns - 1)
    turns = tuple(
        Turn(
            text=f"{_story(rng, n)} {rng.choice(QUESTIONS)}",
            answer_tokens=rng.randint(phase.answer_tokens * 3 // 4, phase.answer_tokens * 5 // 4),
            think_seconds=rng.uniform(0.5, 1.5) * phase.think_seconds if i else 0.0,
        )
        for i, n in enumerate(words)
    )
    return Session(number=number, phase=phase.name, start_seconds=start, system=system, turns=turns)


def _story(rng: random.Random, num_words: int) -> str:
    """Sentences until there are enough words."""
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < num_words:
        thing, concern = rng.choice(THINGS), rng.choice(CONCERNS)
        sentences.append(f"On day {rng.randrange(1, 365)} {thing} {concern}.")
    return " ".join(sentences)
