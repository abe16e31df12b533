"""The pages, comments, docstrings and messages keep to the agreed wording."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COVERED = ("README.md", "CHANGELOG.md", "docs", "configs", "megatron_ampipe", "scripts", "tests")
WORDINGS = {
    r"\bh[eo]lds? (\w+ ){0,3}against\b": "checked against, compared with",
    r"\bhang(s|ing)? on (?!start|rank)": "depends on",
    r"(?<!left )(?<!leave )(?<!leaves )(?<!lag )(?<!lags )(?<!falls )\bbehind\b"
    r"(?! (a|an|the) (flag|option|proxy|firewall|load balancer))": "after (in time); below, under (in place)",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\balike\b": "identically, equally, both",
    r"\bof (ours|mine|yours|theirs)\b": "AMPipe's, custom",
    r"(?<!line )(?<!lines )\bof (its|their|one's|our|your|his) own\b": "its own, a separate, a custom",
    r"\blet(s|ting)? (\w+ ){0,4}go\b(?! to)": "release",
    r"\bwithout (its|their) history\b": "detached",
    r"\bhow-?manieth\b": "index, number",
    r"\bdoors?\b": "entry point, way",
    r"\bhopeless\w*": "clearly slower",
    r"\bleaves? early\b": "is dropped early",
    r"\b(speaks|spoke|speak up|speaking up)\b": "prints, reports",
    r"\bthere and back\b": "dispatch and combine, both directions",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\breckon\w*": "compute, estimate",
    r"\b(whence|thence|hitherto|thereof|wherein|whilst|amidst|lest)\b": "a plain word",
    r"\btells? of\b": "reports",
    r"\bfor ever\b": "forever",
    r"\b(curves?|runs?|losses|simulator) part\b(?! of)": "diverge, differ",
}
"""Phrases that readers stumble over, in text with single blanks, and what to write instead."""


def prose(path: Path) -> str:
    """What a reader reads of a file, with single blanks."""
    text = path.read_text()
    if path.suffix == ".md":
        # Of the changelog, released sections are history.
        released = r"^## \[\d.*" if path.name == "CHANGELOG.md" else r"(?!)"
        text = re.sub(rf"^```.*?^```|<!--.*?-->|{released}", " ", text, flags=re.M | re.S)
    else:
        # A phrase may go on in the next line of a comment or in the next string.
        text = re.sub(r"^\s*#|\b[rf]*\"|\"", " ", text, flags=re.M)
    return " ".join(text.split())


def test_nothing_is_left_to_change() -> None:
    paths = [path for name in COVERED for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    read = {
        path.relative_to(ROOT).as_posix(): prose(path)
        for path in paths
        # Entries of the log keep their words.
        if path.suffix in {".md", ".py", ".sh", ".sbatch", ".yaml"}
        and path != Path(__file__)
        and not path.match("docs/log/2*.md")
    }
    assert len(read) > 300
    left = [
        f"{name}: '{match[0]}': write {instead}"
        for name, text in read.items()
        for pattern, instead in WORDINGS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not left, "\n".join(left)
