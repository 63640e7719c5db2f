"""Which functions belong to training and which are held out.

A function's skeleton is its text with every identifier numbered by first appearance and every constant
replaced by its kind. Functions that are equal as syntax trees with identifiers normalised have equal
skeletons, since the generator writes each tree in one way only.
"""

import hashlib
import re
from typing import List

TRAIN = "train"
HELDOUT = "heldout"
SALT = "lego-mini-1415"  # chosen so that every family of functions is held out in part
KEYWORDS = set("def return for in if else not and or while continue".split())
PART = re.compile(r"'[^']*'|[A-Za-z_]\w*|\d+")


def definitions(lines: List[str]) -> List[List[str]]:
    """The lines of each `def`."""
    found = []
    for line in lines:
        if line.startswith("def "):
            found.append([])
        found[-1].append(line)
    return found


def skeleton(lines: List[str]) -> str:
    """The skeleton of one definition."""
    numbers = {}

    def anonymise(match):
        part = match.group(0)
        if part.startswith("'"):
            return "''"
        if part.isdigit():
            return "0"
        if part in KEYWORDS:
            return part
        if part in ("True", "False"):
            return "True"
        return numbers.setdefault(part, f"v{len(numbers)}")

    return PART.sub(anonymise, "\n".join(lines))


def skeletons(lines: List[str]) -> List[str]:
    """The skeletons of a function and its helpers."""
    return [skeleton(definition) for definition in definitions(lines)]


def split_of(skeleton: str) -> str:
    """One skeleton in seven is held out."""
    digest = hashlib.sha256((SALT + skeleton).encode()).hexdigest()
    return HELDOUT if int(digest, 16) % 7 == 0 else TRAIN


def belongs(lines: List[str], split: str) -> bool:
    """Do a function and all its helpers belong to `split`?"""
    return all(split_of(skeleton) == split for skeleton in skeletons(lines))
