"""The training command of a job script: its flags, variables and numbers of GPUs. Nothing is executed.

A script assigns texts and arrays, and at the end starts ``pretrain_gpt.py`` or another script with them.
Where it starts none, every array and text that begins with a flag counts. Conditions are decided where their
values are known; what is not read, such as a loop, is reported with its line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ampipe.files.shell_words import (
    Array,
    Field,
    Lexer,
    Part,
    Token,
    Variables,
    Word,
    expand,
    fields_of,
    value_of_word,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_LAUNCHER = re.compile(r"--(nproc[-_]per[-_]node|nnodes|node[-_]rank|master[-_]addr|master[-_]port)(=.*)?")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--[\w-]+|-\w)[=\s]\s*(\S+)", re.M)
_SCRIPT = re.compile(r"\S*\.py")
_TESTS = ("[", "[[", "test")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """What was read.

    Attributes:
        words: The arguments of the training script.
        exported: The variables that the script exports.
        gpus_per_node: What torchrun or SLURM gets; ``nodes`` likewise; None if unknown.
        notes: A line and a sentence for each part that was not read.
    """

    words: tuple[Field, ...]
    exported: Mapping[str, str]
    gpus_per_node: int | None
    nodes: int | None
    notes: tuple[tuple[int, str], ...]


def read_script(path: Path, text: str, *, inherited: Mapping[str, str]) -> JobScript:
    """Read a script; ``inherited`` are the variables of the shell that would run it.

    Raises :class:`BadInput` for a quote or a parenthesis that is not closed.
    """
    reader = _Reader(Variables(inherited))
    reader.read(list(Lexer(path, text).tokens()))
    launch = reader.training_command()
    given = {name: value for name, value in _DIRECTIVE.findall(text)}
    launcher = _launcher_values(launch.before)
    directives = _numbers_of(given)
    return JobScript(
        words=tuple(launch.words),
        exported={name: reader.variables.text_of(name) for name in reader.exported},
        gpus_per_node=launcher.get("gpus") or directives.get("gpus"),
        nodes=launcher.get("nodes") or directives.get("nodes"),
        notes=tuple(sorted(reader.notes)),
    )


@dataclass(slots=True)
class _Command:
    """A command with its words expanded: what starts the script, and its arguments."""

    before: Sequence[Field]
    words: Sequence[Field]


def _launcher_values(before: Sequence[Field]) -> dict[str, int]:
    """The numbers of nodes and of GPUs per node of torchrun's arguments."""
    found: dict[str, int] = {}
    texts = [word.text for word in before]
    for index, text in enumerate(texts):
        name, separator, attached = text.partition("=")
        value = attached if separator else "".join(texts[index + 1 : index + 2])
        key = {"nproc-per-node": "gpus", "nnodes": "nodes"}.get(name.lstrip("-").replace("_", "-"))
        if key is not None and value.isdecimal():
            found[key] = int(value)
    return found


def _numbers_of(directives: Mapping[str, str]) -> dict[str, int]:
    """The numbers of nodes and of GPUs per node of ``#SBATCH`` lines."""
    found: dict[str, int] = {}
    names = {"nodes": ("--nodes", "-N"), "gpus": ("--gpus-per-node", "--gres", "--ntasks-per-node")}
    for key, flags in names.items():
        for flag in flags:
            number = directives.get(flag, "").rpartition(":")[2]
            if number.isdecimal():
                found.setdefault(key, int(number))
    return found


@dataclass(slots=True)
class _Reader:
    """Walks through a script.

    Attributes:
        scopes: For each open ``if``: whether its present branch is taken, None if unknown, and whether an
            earlier branch was taken or is unknown.
        skipped: Words that end the parts that are skipped, such as ``done``.
    """

    variables: Variables
    commands: list[_Command] = field(default_factory=list)
    lines_of_flags: list[Field] = field(default_factory=list)
    defined: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    scopes: list[tuple[bool | None, bool | None]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    condition: list[bool | None] | None = None
    held: bool | None = True
    """Whether the command before ``&&`` or ``||`` holds."""

    def read(self, tokens: Sequence[Token]) -> None:
        """Read all commands in order."""
        joined = "\n"
        command: list[Word | Array] = []
        for token, following in itertools.pairwise([*tokens, "\n", "\n"]):
            if not isinstance(token, str):
                command.append(token)
                continue
            if command and (token, following) == ("(", ")"):
                self._note(command, "functions are not followed")
                self.skipped.append("}")
                command = []
            if command:
                self._read_command(command, joined)
                command = []
            joined = token

    def _read_command(self, command: list[Word | Array], joined: str) -> None:
        first = command[0].plain if isinstance(command[0], Word) else ""
        if self._read_control(first, command):
            return
        if self.skipped:
            return
        if first in ("then", "else", "do", "!") and len(command) > 1:
            self._read_command(command[1:], joined)
            return
        runs: bool | None = True
        if joined in ("&&", "||"):
            runs = self.held if joined == "&&" or self.held is None else not self.held
        if runs and self.condition is not None:
            self.held = self._holds(command)
            self.condition.append(self.held)
            return
        if runs and first in _TESTS:
            self.held = self._holds(command)
            return
        taken = [scope[0] for scope in self.scopes]
        if runs is False or False in taken:
            return
        if runs is None or None in taken:
            if self._matters(command):
                self._note(command, "it is not known whether this part runs")
            return
        self._run(command)

    def _note(self, command: Sequence[Word | Array], why: str) -> None:
        first = command[0]
        shown = f"{first.name}=(...)" if isinstance(first, Array) else first.plain.partition("\n")[0]
        self.notes.append((first.line, f"{shown} is not read: {why}"))

    def _matters(self, command: Sequence[Word | Array]) -> bool:
        """Whether a command sets an argument or a variable."""
        first = command[0]
        if isinstance(first, Array):
            return True
        return bool(_ASSIGNMENT.match(first.plain)) or any(
            isinstance(word, Word) and _SCRIPT.fullmatch(word.plain) for word in command
        )

    def _read_control(self, first: str, command: list[Word | Array]) -> bool:
        """Follow branches, and skip loops and functions; True if the command was a part of them."""
        if self.skipped:
            opened = {"for": "done", "while": "done", "until": "done", "case": "esac"}.get(first)
            if opened is not None and self.skipped[-1] != "}":
                self.skipped.append(opened)
            elif first == self.skipped[-1]:
                self.skipped.pop()
            return True
        if first in ("for", "while", "until", "select", "case"):
            self._note(command, "loops and case are not followed")
            self.skipped.append("esac" if first == "case" else "done")
            return True
        if first == "function":
            self._note(command, "functions are not followed")
            self.skipped.append("}")
            return True
        if first == "{" and len(command) == 1:
            return True
        if first in ("if", "elif"):
            self._begin_branch(first, command[1:])
            return True
        if first == "then":
            conditions = self.condition or []
            self.condition = None
            self._decide(conditions[-1] if conditions else None)
            if len(command) > 1:
                self._read_command(command[1:], "\n")
            return True
        if first == "else" and self.scopes:
            _, earlier = self.scopes.pop()
            self.scopes.append((None if earlier is None else not earlier, earlier))
            if len(command) > 1:
                self._read_command(command[1:], "\n")
            return True
        if first == "fi":
            if self.scopes:
                self.scopes.pop()
            return True
        return False

    def _begin_branch(self, first: str, condition: list[Word | Array]) -> None:
        earlier: bool | None = False
        if first == "elif" and self.scopes:
            _, earlier = self.scopes.pop()
        self.scopes.append((True, earlier))
        self.condition = []
        if condition:
            self._read_command(condition, "\n")

    def _decide(self, holds: bool | None) -> None:
        """Enter the branch after ``then``."""
        if not self.scopes:
            return
        _, earlier = self.scopes.pop()
        taken: bool | None
        any_taken: bool | None
        if earlier:
            # An earlier branch was taken.
            taken, any_taken = False, True
        elif earlier is None:
            taken, any_taken = None, None
        else:
            taken, any_taken = holds, holds
        self.scopes.append((taken, any_taken))

    def _holds(self, command: Sequence[Word | Array]) -> bool | None:
        """Whether a test holds; None if that is not known. A variable that is not set is empty."""
        words = [word for word in command if isinstance(word, Word)]
        if words[0].plain in ("true", "false"):
            return words[0].plain == "true"
        if words[0].plain not in _TESTS:
            return None
        negated = len(words) > 1 and words[1].plain == "!"
        values = [self._tested(word) for word in words[2 if negated else 1 :]]
        if values and values[-1] in ("]", "]]"):
            values.pop()
        result = _compared(values)
        return result if result is None or not negated else not result

    def _tested(self, word: Word) -> str | None:
        """The value of a word of a test; None if it is not known."""
        pieces = value_of_word(word.parts, self.variables)
        unset = [piece for piece in pieces if piece.unknown]
        if any(piece.text.startswith(("$(", "`")) for piece in unset):
            return None
        return "".join(piece.text for piece in pieces if not piece.unknown)

    def _run(self, command: list[Word | Array]) -> None:
        """An assignment, or a command that may be the training."""
        words = command
        declares = isinstance(words[0], Word) and words[0].plain in _DECLARES
        is_exported = declares and words[0].plain == "export"  # type: ignore[union-attr]
        if declares:
            words = words[1:]
        while words and self._assign(words[0], exported=is_exported):
            words = words[1:]
        if declares or not words:
            return
        plain = [word for word in words if isinstance(word, Word)]
        if plain and plain[0].plain in ("source", "."):
            self._note(plain[1:] or plain, "other files are not followed")
            return
        self._run_words(expand(plain, self.variables))

    def _assign(self, word: Word | Array, *, exported: bool) -> bool:
        if isinstance(word, Array):
            name, adds = word.name, word.adds
            fields = expand(word.words, self.variables)
            before = self.variables.arrays.get(name, []) if adds else []
            self.variables.texts.pop(name, None)
            self.variables.arrays[name] = [*before, *fields]
        else:
            match = _ASSIGNMENT.match(word.plain)
            if match is None or word.parts[0].quote:
                return False
            name, adds = match[1], bool(match[2])
            value = value_of_word(_without(word.parts, match.end()), self.variables)
            before_text = self.variables.of(name, word.line) or () if adds else ()
            self.variables.texts[name] = (*before_text, *value)
        if exported and name not in self.exported:
            self.exported.append(name)
        if name not in self.defined:
            self.defined.append(name)
        return True

    def _run_words(self, words: list[Field]) -> None:
        if not words:
            return
        if words[0].text.startswith("--"):
            self.lines_of_flags += words
            return
        if words[0].text in ("echo", "printf"):
            return
        launch = _launch_of(words)
        if launch is not None:
            self.commands.append(launch)

    def training_command(self) -> _Command:
        """The arguments of the last command that starts a Python script with flags, or of all variables."""
        if self.commands:
            return self.commands[-1]
        launcher: list[Field] = []
        flags: list[Field] = []
        for name in self.defined:
            words = self._words_of(name)
            launch = _launch_of(words)
            if launch is not None:
                return launch
            if not words or not words[0].text.startswith("--"):
                continue
            if any(_LAUNCHER.fullmatch(word.text) for word in words):
                launcher += words
            else:
                flags += words
        return _Command(launcher, [*flags, *self.lines_of_flags])

    def _words_of(self, name: str) -> list[Field]:
        """The value of a variable, split at blanks."""
        if name in self.variables.arrays:
            return self.variables.arrays[name]
        word = Word((Part(f"${{{name}}}", 0, ""),), 0)
        return expand([word], self.variables)


def _without(parts: Sequence[Part], count: int) -> Iterator[Part]:
    """The parts of a word without its first characters, which are not quoted."""
    for part in parts:
        cut = min(count, len(part.text))
        count -= cut
        yield part._replace(text=part.text[cut:])


def _compared(values: Sequence[str | None]) -> bool | None:
    """The result of a test of one or two values."""
    match values:
        case ["-n", str(value)]:
            return bool(value)
        case ["-z", str(value)]:
            return not value
        case ["-n" | "-z"]:
            # An unquoted variable that is not set is no word at all.
            return values[0] == "-z"
        case [str(value)]:
            return bool(value)
        case [str(left), "=" | "==", str(right)] if "*" not in right:
            return left == right
        case [str(left), "!=", str(right)] if "*" not in right:
            return left != right
        case [str(left), str(name), str(right)] if name in _NUMBERS:
            if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
                return None
            first, second = int(left), int(right)
            results = {
                "==": first == second,
                "!=": first != second,
                ">": first > second,
                "<": first < second,
                ">=": first >= second,
                "<=": first <= second,
            }
            return results[_NUMBERS[name]]
    return None


def _launch_of(words: Sequence[Field]) -> _Command | None:
    """A command that starts a Python script with flags; None for another one."""
    split: list[Field] = []
    for word in words:
        # The whole command may be one quoted word, as of bash -c.
        split += fields_of([(word.pieces, False)], word.line) if _starts_script(word) else [word]
    for index, word in enumerate(split):
        if _SCRIPT.fullmatch(word.text) and any(after.text.startswith("--") for after in split[index + 1 :]):
            return _Command(split[:index], split[index + 1 :])
    return None


def _starts_script(word: Field) -> bool:
    return re.search(r"\.py\s+\S", word.text) is not None
