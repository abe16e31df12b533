"""The agreed wording: phrases that readers stumble over, each with what to write instead.

Reads the pages in Markdown without their code, and of Python files and shell scripts the docstrings, comments
and string literals. Called by ``tests/unit/test_prose.py``. To list what is left to change:

    python -m tests.prose [FILE_OR_FOLDER ...]
"""

from __future__ import annotations

import fnmatch
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COVERED: tuple[str, ...] = (
    "README.md",
    "CHANGELOG.md",
    "docs",
    "patches",
    "configs",
    "megatron_ampipe",
    "scripts",
    "tests",
)
"""Files and folders that are checked."""

LEFT_OUT = ("docs/log/2*.md", "tests/prose.py", "tests/unit/test_prose.py")
"""Not checked: entries of the log, which keep their words, and the two files that contain the phrases."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A phrase to avoid."""

    pattern: str
    """A regular expression; a blank stands for any white space, also across lines. Case does not matter."""
    instead: str
    example: str
    """A sentence in which the phrase is found."""


WORDINGS = (
    Wording(r"\bh[eo]lds? (\w+ ){0,3}against\b", "checked against, compared with", "is held against stock"),
    Wording(r"\bhang(s|ing)? on (?!start|rank)", "depends on", "the speedup hangs on the machine"),
    Wording(
        r"(?<!left\s)(?<!leave\s)(?<!leaves\s)(?<!lag\s)(?<!lags\s)(?<!falls\s)\bbehind\b"
        r"(?! (a|an|the) (flag|option|proxy|firewall|load balancer))",
        "after (in time); below, under (in place)",
        "one chunk behind the other",
    ),
    Wording(r"\bbeside\b", "next to, compared with, in addition to", "shows it beside stock"),
    Wording(r"\balike\b", "identically, equally, both", "for stock and AMPipe alike"),
    Wording(r"\bof (ours|mine|yours|theirs)\b", "AMPipe's, custom", "a flag of ours"),
    Wording(
        r"(?<!line\s)(?<!lines\s)\bof (its|their|one's|our|your|his) own\b",
        "its own, a separate, a custom",
        "a thread of its own",
    ),
    Wording(r"\blet(s|ting)? (\w+ ){0,4}go\b(?! to)", "release", "lets the graph go"),
    Wording(r"\bwithout (its|their) history\b", "detached", "come out without their history"),
    Wording(r"\bhow-?manieth\b", "index, number", "in the how-manieth pass"),
    Wording(r"\bdoors?\b", "entry point, way", "by another door"),
    Wording(r"\bhopeless\w*", "clearly slower", "a hopeless degree"),
    Wording(r"\bleaves? early\b", "is dropped early", "a slow degree leaves early"),
    Wording(r"\b(speaks|spoke|speak up|speaking up)\b", "prints, reports", "and speaks"),
    Wording(r"\bthere and back\b", "dispatch and combine, both directions", "the way there and back"),
    Wording(r"\bmend(s|ed|ing)?\b", "fix", "mended since"),
    Wording(r"\breckon\w*", "compute, estimate", "reckoned from"),
    Wording(
        r"\b(whence|thence|hitherto|thereof|wherein|whilst|amidst|lest)\b", "a plain word", "whence it came"
    ),
    Wording(r"\btells? of\b", "reports", "tells of the arrival"),
    Wording(r"\bfor ever\b", "forever", "waits for ever"),
    Wording(r"\b(curves?|runs?|losses|simulator) part\b(?! of)", "diverge, differ", "the curves part"),
    Wording(r"\bdocs/log\.md\b", "docs/log", "see docs/log.md"),
    Wording(r"\btravel_together\b", "exchange_chunks", "`travel_together`"),
    Wording(r"\bcalm_event_loops\b", "demote_gloo_threads", "`calm_event_loops`"),
    Wording(r"\bof_backward\b", "backward_degree", "`of_backward`"),
)

FINE = (
    "The backward pass runs behind a flag, and behind a proxy.",
    "What a run leaves behind is listed there.",
    "Besides, it hangs on start-up, on rank 3. Write it on a line of its own.",
    "It letters the chunks; let the script go to the next node.",
    "There are doorways in no file. The amendment is held by each rank.",
    "A part of the run's losses; a run part of which is timed.",
)
"""Sentences in which nothing is found."""

_COMPILED = tuple((re.compile(w.pattern.replace(" ", r"\s+"), re.IGNORECASE), w) for w in WORDINGS)


@dataclass(frozen=True, slots=True)
class Finding:
    """A phrase that was found."""

    line: int
    found: str
    instead: str


def findings(text: str) -> Iterator[Finding]:
    """What to change in a text; lines count from 1."""
    for pattern, wording in _COMPILED:
        for match in pattern.finditer(text):
            yield Finding(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), wording.instead)


def prose_of_markdown(text: str) -> str:
    """The text with code blanked out, line for line."""
    for code in (r"^```.*?^```", r"<!--.*?-->"):
        text = re.sub(code, lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S)
    return text


def prose_of_python(text: str) -> str:
    """Comments and strings, line for line; ends of statements keep neighbours apart."""
    lines = [""] * (text.count("\n") + 2)
    kinds = {tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            words = token.string.removeprefix("#") if token.type == tokenize.COMMENT else token.string
            for offset, line in enumerate(words.split("\n")):
                lines[token.start[0] - 1 + offset] += f" {line.strip('"')} "
        elif token.type == tokenize.NEWLINE:
            lines[token.start[0] - 1] += " ."
    return "\n".join(lines)


def prose_of_shell(text: str) -> str:
    """A script or a YAML file as it is, without the signs of comments."""
    return re.sub(r"^\s*#", " ", text, flags=re.M)


def newest_section(changelog: str) -> str:
    """The head of the file and its first section; released ones are history."""
    sections = [match.start() for match in re.finditer(r"^## ", changelog, re.M)]
    return changelog[: sections[1]] if len(sections) > 1 else changelog


def prose(path: Path) -> str | None:
    """What a reader reads of a file, with its line numbers; None where there is nothing to check."""
    if path.suffix == ".md":
        text = path.read_text()
        return prose_of_markdown(newest_section(text) if path.name == "CHANGELOG.md" else text)
    if path.suffix == ".py":
        return prose_of_python(path.read_text())
    if path.suffix in {".sh", ".sbatch", ".yaml"}:
        return prose_of_shell(path.read_text())
    return None


def files(names: Iterable[str]) -> Iterator[Path]:
    """The files that these names stand for, without those left out."""
    for name in names:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            place = path.relative_to(ROOT).as_posix()
            if path.is_file() and not any(fnmatch.fnmatch(place, out) for out in LEFT_OUT):
                yield path


def report(names: Iterable[str]) -> list[str]:
    """One line for each finding: where, what, and what to write."""
    lines = []
    for path in files(names):
        text = prose(path)
        for finding in findings(text) if text else ():
            place = f"{path.relative_to(ROOT).as_posix()}:{finding.line}"
            lines.append(f"{place}: '{finding.found}': write {finding.instead}")
    return lines


if __name__ == "__main__":
    left = report(sys.argv[1:] or COVERED)
    print("\n".join(left) if left else "Nothing to change.")
    sys.exit(4 if left else 0)
