"""The words of a shell script, and what they expand to. Nothing of a script is executed.

Covers what job scripts use for arguments: quotes, backslashes, comments, arrays, here-documents, variables
with defaults, whole-number arithmetic. Of anything else, such as the output of a command, a
:data:`Text` has an unknown part with the reason.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ampipe.files.inputs import refuse

SEPARATORS = ("\n", ";", "&", "|", "&&", "||", ";;", "(", ")")
_NAME = re.compile(r"[A-Za-z_]\w*")
_BLANKS = re.compile(r"(\s+)|(\S+)")
_PLAIN = re.compile(r"\$?[\w.,:/%+=@-]+")
"""Characters without a meaning for a shell, also as the name of a variable."""
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@#*?])(\[[@*]\])?(?:(:?[-=])(.*))?", re.S)


class Piece(NamedTuple):
    """Text of one line; ``unknown`` says why it cannot be read."""

    text: str
    line: int
    unknown: bool = False


Text = tuple[Piece, ...]
"""A value: pieces that are joined."""


class Part(NamedTuple):
    """A part of a word as it is written: quoted by ``'``, by ``"`` or not (empty)."""

    text: str
    line: int
    quote: str


class Word(NamedTuple):
    """A word of a command, before expansion."""

    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str:
        """As it is written, without quotes."""
        return "".join(part.text for part in self.parts)


class Array(NamedTuple):
    """``NAME=(...)`` or ``NAME+=(...)``."""

    name: str
    adds: bool
    words: tuple[Word, ...]
    line: int


Token = str | Word | Array
"""What a script consists of; text is one of :data:`SEPARATORS`."""


@dataclass(frozen=True, slots=True)
class Field:
    """A word after expansion."""

    pieces: Text

    @property
    def text(self) -> str:
        """All of it; of an unknown part the reason."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.pieces[0].line if self.pieces else 0

    @property
    def unknown(self) -> str | None:
        """The first part that cannot be read."""
        return next((piece.text for piece in self.pieces if piece.unknown), None)


@dataclass(slots=True)
class Variables:
    """The variables of a script: texts and arrays, and those that it inherits."""

    inherited: Mapping[str, str]
    texts: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, list[Field]] = field(default_factory=dict)

    def of(self, name: str, line: int) -> Text | None:
        """The value of a variable; None if it is not set."""
        if name in self.texts:
            return self.texts[name]
        if name in self.arrays:
            first = self.arrays[name][:1]
            return first[0].pieces if first else ()
        if name in self.inherited:
            return (Piece(self.inherited[name], line),)
        return None

    def text_of(self, name: str) -> str:
        """The value as text; empty if it is not set, as in a shell."""
        return "".join(piece.text for piece in self.of(name, 0) or ())


class Lexer:
    """Splits a script into tokens."""

    def __init__(self, path: object, script: str) -> None:
        self._path, self._script = path, script
        self._at, self._line = 0, 1
        self._documents: list[str] = []

    def tokens(self) -> Iterator[Token]:
        """All tokens of the script."""
        while self._at < len(self._script):
            char = self._script[self._at]
            if char in " \t\r" or self._script.startswith("\\\n", self._at):
                self._skip(2 if char == "\\" else 1)
            elif char == "#":
                self._skip_to("\n")
            elif char in "\n;&|()":
                yield self._separator()
            elif char in "<>":
                self._redirection()
            else:
                yield self._word()

    def _skip(self, count: int) -> str:
        text = self._script[self._at : self._at + count]
        self._at += count
        self._line += text.count("\n")
        return text

    def _skip_to(self, end: str, *, past: bool = False) -> str:
        """The text up to ``end``; raises BadInput if it is not there and has to be skipped."""
        found = self._script.find(end, self._at)
        if found < 0 and past:
            remedy = "Give a script that bash accepts (bash -n FILE), or a YAML file with ARGS."
            refuse(str(self._path), self._line, end, "is not closed", remedy)
        found = len(self._script) if found < 0 else found
        text = self._skip(found - self._at)
        if past:
            self._skip(len(end))
        return text

    def _separator(self) -> str:
        pair = self._script[self._at : self._at + 2]
        text = self._skip(2 if pair in SEPARATORS else 1)
        if text == "\n":
            for end in self._documents:
                self._skip_document(end)
            self._documents.clear()
        return text

    def _skip_document(self, end: str) -> None:
        while self._at < len(self._script):
            line = self._skip_to("\n")
            self._skip(1)
            if line.strip() == end:
                return

    def _redirection(self) -> None:
        """Skip a redirection, which changes no argument; remember the end of a here-document."""
        if self._script.startswith("<<", self._at) and not self._script.startswith("<<<", self._at):
            self._skip(3 if self._script.startswith("<<-", self._at) else 2)
            self._skip_blanks()
            self._documents.append(self._word_text().plain)
            return
        while self._at < len(self._script) and self._script[self._at] in "<>&":
            self._skip(1)
        self._skip_blanks()
        if self._at < len(self._script) and self._script[self._at] not in "\n;&|()":
            self._word_text()

    def _skip_blanks(self) -> None:
        while self._at < len(self._script) and self._script[self._at] in " \t":
            self._skip(1)

    def _word(self) -> Token:
        assigned = re.compile(r"([A-Za-z_]\w*)(\+?)=\(").match(self._script, self._at)
        if assigned is None:
            return self._word_text()
        line = self._line
        self._skip(len(assigned[0]))
        words: list[Word] = []
        while True:
            if self._at >= len(self._script):
                self._skip_to(")", past=True)
            char = self._script[self._at]
            if char == ")":
                self._skip(1)
                return Array(assigned[1], bool(assigned[2]), tuple(words), line)
            if char in " \t\r\n" or self._script.startswith("\\\n", self._at):
                self._skip(2 if char == "\\" else 1)
            elif char == "#":
                self._skip_to("\n")
            else:
                words.append(self._word_text(ends=" \t\r\n)"))

    def _word_text(self, ends: str = " \t\r\n;&|()<>") -> Word:
        """A word up to a blank or an operator."""
        parts: list[Part] = []
        start = self._line
        while self._at < len(self._script) and self._script[self._at] not in ends:
            char, line = self._script[self._at], self._line
            if char == "\\":
                if self._script.startswith("\\\n", self._at):
                    self._skip(2)
                    break
                self._skip(1)
                parts.append(Part(self._skip(1), line, "'"))
            elif char == "'":
                self._skip(1)
                parts.append(Part(self._skip_to("'", past=True), line, "'"))
            elif char == '"':
                self._skip(1)
                parts.append(Part(self._double_quoted(), line, '"'))
            else:
                parts.append(Part(self._unquoted(), line, ""))
        return Word(tuple(parts), start)

    def _double_quoted(self) -> str:
        """The raw text up to the closing quote."""
        begin = self._at
        while self._at < len(self._script) and self._script[self._at] != '"':
            if self._script[self._at] == "\\":
                self._skip(2)
            elif self._script.startswith("$(", self._at):
                self._enclosed()
            else:
                self._skip(1)
        text = self._script[begin : self._at]
        self._skip_to('"', past=True)
        return text

    def _unquoted(self) -> str:
        if self._script[self._at] == "`":
            self._skip(1)
            return f"`{self._skip_to('`', past=True)}`"
        if self._script[self._at : self._at + 2] in ("$(", "${"):
            return self._enclosed()
        plain = _PLAIN.match(self._script, self._at)
        return self._skip(len(plain[0]) if plain else 1)

    def _enclosed(self) -> str:
        """``$(...)`` or ``${...}``, with what is nested."""
        begin = self._at
        self._skip(1)
        opening = self._script[self._at]
        closing, depth = {"(": ")", "{": "}"}[opening], 0
        while self._at < len(self._script):
            char = self._skip(1)
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return self._script[begin : self._at]
        self._skip_to(closing, past=True)
        raise AssertionError("refused above")


def expand(words: Sequence[Word], variables: Variables) -> list[Field]:
    """The words of a command or an array after expansion, with unquoted values split at blanks."""
    return [found for word in words for found in _fields(word, variables)]


def value_of_word(parts: Iterable[Part], variables: Variables) -> Text:
    """The value of the right side of an assignment, which is not split."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += _literal(part) if part.quote == "'" else _expanded(part, variables)
    return tuple(pieces)


def _fields(word: Word, variables: Variables) -> Iterator[Field]:
    array = _array_of(word)
    if array is not None and array in variables.arrays:
        is_quoted = word.parts[0].quote == '"'
        for element in variables.arrays[array]:
            yield from [element] if is_quoted else fields_of([(element.pieces, False)], word.line)
        return
    yield from fields_of(_values(word, variables), word.line)


def _values(word: Word, variables: Variables) -> Iterator[tuple[Text, bool]]:
    """The value of each part, and whether it is quoted."""
    for part in word.parts:
        pieces = _literal(part) if part.quote == "'" else _expanded(part, variables)
        yield tuple(pieces), bool(part.quote)


def fields_of(values: Iterable[tuple[Text, bool]], line: int) -> Iterator[Field]:
    """Joined values, of which those that are not quoted are split at blanks."""
    current: list[Piece] = []
    is_begun = False
    for pieces, is_quoted in values:
        if is_quoted:
            current += pieces
            is_begun = True
            continue
        for piece in pieces:
            if piece.unknown:
                current.append(piece)
                continue
            for blank, text in _BLANKS.findall(piece.text):
                if text:
                    current.append(Piece(text, piece.line))
                elif blank and (current or is_begun):
                    yield Field(tuple(current) or (Piece("", line),))
                    current, is_begun = [], False
    if current or is_begun:
        yield Field(tuple(current) or (Piece("", line),))


def _array_of(word: Word) -> str | None:
    """The array whose elements a word is: ``${NAME[@]}`` or ``"${NAME[@]}"``."""
    match = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", word.plain)
    return match[1] if match else None


def _literal(part: Part) -> list[Piece]:
    return [Piece(text, part.line + index) for index, text in enumerate(part.text.splitlines(keepends=True))]


def _expanded(part: Part, variables: Variables) -> Iterator[Piece]:
    """The pieces of a part that is not in single quotes."""
    text, line, at = part.text, part.line, 0
    plain = ""
    while at < len(text):
        char = text[at]
        if char == "\\" and part.quote:
            following = text[at + 1 : at + 2]
            if following != "\n":
                plain += following if following in '$`"\\' else char + following
            else:
                # A line that goes on ends a word only if a blank is next to the backslash.
                yield Piece(plain, line)
                plain, line = "", line + 1
            at += 2
        elif char == "`" or (char == "$" and at + 1 < len(text)):
            yield Piece(plain, line)
            plain = ""
            source = _source(text, at)
            yield from _value(source, line, variables)
            at += len(source)
            line += source.count("\n")
        else:
            plain += char
            at += 1
            if char == "\n":
                yield Piece(plain, line)
                plain, line = "", line + 1
    yield Piece(plain, line)


def _source(text: str, at: int) -> str:
    """The expansion that begins here, as it is written."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return text[at:] if end < 0 else text[at : end + 1]
    opening = text[at + 1]
    if opening not in "({":
        name = _NAME.match(text, at + 1)
        return text[at : name.end()] if name else text[at : at + 2]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    for end in range(at + 1, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return text[at : end + 1]
    return text[at:]


def _value(source: str, line: int, variables: Variables) -> Text:
    """The value of an expansion."""
    if source.startswith("$((") and source.endswith("))"):
        number = computed(source[3:-2], variables)
        return (Piece(source, line, unknown=True),) if number is None else (Piece(str(number), line),)
    if source.startswith(("$(", "`")):
        return (Piece(source, line, unknown=True),)
    inside = source[2:-1] if source.startswith("${") else source[1:]
    if inside == "#":
        # A script that is run without arguments.
        return (Piece("0", line),)
    match = _BRACED.fullmatch(inside)
    if match is None:
        return (Piece(source, line, unknown=True),)
    name, elements, condition, default = match.groups()
    if elements and name in variables.arrays:
        joined = [(Piece(" ", line), *found.pieces) for found in variables.arrays[name]]
        return tuple(piece for pieces in joined for piece in pieces)[1:]
    value = variables.of(name, line)
    is_empty = value is not None and not any(piece.text for piece in value)
    if condition is not None and (value is None or (is_empty and condition.startswith(":"))):
        lexer = Lexer("default", default or "")
        words = [token for token in lexer.tokens() if isinstance(token, Word)]
        parts = [part._replace(line=line) for word in words for part in word.parts]
        return value_of_word(parts, variables)
    if value is None:
        return (Piece(source, line, unknown=True),)
    return value


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def computed(expression: str, variables: Variables) -> int | None:
    """The value of ``$((...))``; None if it has unknown variables or other operators."""
    names = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: match[1] or match[2], expression)
    try:
        return _number(ast.parse(names.replace("/", "//").strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr, variables: Variables) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(variables.text_of(name))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left, variables), _number(right, variables))
    raise ValueError(node)
