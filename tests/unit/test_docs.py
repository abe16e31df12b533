"""README, docs and docstrings name only what exists: files, names, commands, flags, environment variables.

Names are read from the sources. Nothing but plans is run: a command in a ``sh`` block has to be one of
``COMMANDS``, and its ``ampipe`` arguments have to parse.
"""

import argparse
import ast
import functools
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ampipe.cli import TOOLS, build_parser, main, parse
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.launch import flags
from tests import algorithm, schedules, supported
from tests.unit.test_routing import eight_experts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/log").glob("*.md"))]
PAGE_IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]

COMMANDS = (
    *(f"./scripts/{name}.sh" for name in ("quickstart", "test", "gpu_check", "soak")),
    "pip install -e '.[tools]'",
    "python -m build --no-isolation",
    *(f"ampipe {tool}" for tool in TOOLS),
    "torchrun --standalone --nproc-per-node 2 -m megatron_ampipe.cli doctor",
    "torchrun --nproc-per-node 8 -m megatron_ampipe.cli profile",
    "torchrun --standalone --nproc-per-node 2 -m megatron_ampipe.launch",
    "torchrun --standalone --nproc-per-node 2 -m megatron_ampipe.pretrain_gpt",
)
"""Allowed beginnings of a command, which other tests run."""

NO_FLAGS = {"--ampipe-": "the prefix itself", "--ampipe-degre": "misspelt in an example on purpose"}
"""Words that look like an AMPipe flag but are not one."""


SOURCES = sorted((ROOT / "megatron_ampipe").rglob("*.py"))
PATTERNS = ("*.*", *(f"{folder}/**/*.*" for folder in ("megatron_ampipe", "docs", "scripts", "tests")))
FILES = [str(path) for pattern in PATTERNS for path in ROOT.glob(pattern)]
ROLE = re.compile(r":(?:mod|func|class|meth|data|attr|exc):`~?\.*([\w.]+)`")
DOTTED = re.compile(r"``?([a-z_]+(?:\.\w+)+)(?:\(\))?``?")
# Cluster files have a section of the same name; a stage has the name of the other.
PACKAGES = {path.parent.name for path in SOURCES} - {"host", "attention"}


def without_code(text: str) -> str:
    """The prose, without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end in, by GitHub's rule."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def shell_commands(text: str) -> list[str]:
    """The commands of all ``sh`` blocks, with continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def names_in(path: Path) -> Iterator[str]:
    """What a module defines, assigns or imports anywhere, and its place in the package."""
    yield from path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


KNOWN = {name for path in SOURCES for name in names_in(path)}


def dead_names(text: str) -> list[str]:
    """Those of roles and of dotted names that begin with a package, of which a part is defined nowhere."""
    named = set(ROLE.findall(text))
    named |= {name for name in DOTTED.findall(text) if name.partition(".")[0] in PACKAGES}
    ours = [name for name in named if name.partition(".")[0] not in sys.stdlib_module_names]
    return sorted(name for name in ours if not KNOWN.issuperset(name.split(".")))


def test_the_page_of_the_algorithm_is_up_to_date() -> None:
    assert algorithm.PAGE.read_text() == algorithm.written(), "run python -m tests.algorithm"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_refer_to_what_exists(path: Path) -> None:
    assert dead_names(path.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_a_page_names_only_what_exists(page: Path) -> None:
    """Files and headings that links lead to, flags, tools, modules and their names."""
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)) if "://" not in target]
    for target in links:
        name, _, anchor = target.partition("#")
        at = page.parent / name if name else page
        assert at.exists(), f"{page.name} links to {name}, which is not there"
        assert not anchor or anchor in anchors(at), f"{page.name} links to {target}: no such heading"
    named = set(re.findall(r"--ampipe-[a-z-]*", text)) - NO_FLAGS.keys()
    parser = flags.add_arguments(argparse.ArgumentParser())
    assert named <= parser._option_string_actions.keys(), f"{page.name} names flags that do not exist"
    tools = set(re.findall(r"(?:`|^)ampipe ([a-z]+)", text, re.M))
    assert tools <= TOOLS.keys(), f"{page.name} names commands that do not exist"
    assert not re.findall(r"/(?:home|root|work|tmp)/\S*", text), "a path of one machine"
    # Entries of the log keep the names of their day.
    if page.parent.name != "log":
        assert dead_names(text) == []
        files = {name.removeprefix("./") for name in re.findall(r"`([\w./-]+\.(?:py|sh|md))`", text)}
        ours = {name for name in files if not name.startswith(("megatron/", "pretrain_"))}
        assert [name for name in ours if not any(file.endswith(f"/{name}") for file in FILES)] == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_shell_commands_are_tested_ones_and_parse(page: Path) -> None:
    for command in shell_commands(page.read_text()):
        assert any(f"{command} ".startswith(f"{known} ") for known in COMMANDS), (
            f"{page.name}: '{command}' is not a known command; test it, and add it to COMMANDS"
        )
        words = shlex.split(command)
        if words[0] == "ampipe":
            parse(words[1:])
        elif words[0] == "torchrun":
            own = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
            _, others = own.parse_known_args(words[1:])
            assert not [word for word in others if word.startswith("--ampipe")]


def test_pages_are_as_short_as_they_should_be_and_the_log_is_indexed() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    assert "./scripts/test.sh" in shell_commands(readme), "what CI runs"
    assert not re.findall(r"/(?:home|root|work|tmp)/\S*", (ROOT / "CHANGELOG.md").read_text())
    log = ROOT / "docs/log"
    index = (log / "README.md").read_text().partition("\n## ")[0]
    days = sorted((page.name for page in log.glob("2*.md")), reverse=True)
    assert days and re.findall(r"\]\((2[\d-]+\.md)\)", index) == days


def test_the_types_to_know_are_classes_of_the_core() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    sentence = re.search(r"know (\d+) types: ([^.]*)\.", text)
    assert sentence is not None
    names = re.findall(r"`(\w+)`", sentence[2])
    assert len(names) == int(sentence[1])
    core = [path.read_text() for path in SOURCES if path.parent.name in ("schedule", "layers", "runtime")]
    classes = {name for source in core for name in re.findall(r"^class (\w+)", source, re.M)}
    assert set(names) <= classes


def test_the_example_of_an_order_is_the_one_that_tests_run() -> None:
    assert inspect.getsource(schedules.interleaved) in (ROOT / "docs" / "schedules.md").read_text()


def help_examples(tool: str | None) -> list[list[str]]:
    """The arguments after ``ampipe`` of every example in a tool's help; for None, in ``ampipe --help``."""
    parser = build_parser(tool)
    if tool is not None:
        (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = commands.choices[tool]
    lines = [line.strip() for line in parser.format_help().partition("examples:\n")[2].splitlines()]
    commands = [line for line in lines if re.match(r"(ampipe|torchrun .* -m megatron_ampipe\.cli) ", line)]
    # The text after two spaces is a description of the command.
    found = [part for line in commands for part in re.split(r"\s{2,}", line)[0].split(" && ")]
    words = [shlex.split(command) for command in found]
    return [each[1 if each[0] == "ampipe" else each.index("megatron_ampipe.cli") + 1 :] for each in words]


@pytest.mark.parametrize("tool", [None, *TOOLS])
def test_every_example_of_help_parses(tool: str | None) -> None:
    """Examples of ``ampipe plan`` are also run, below, and those of ``ampipe config`` in test_settings.py."""
    examples = help_examples(tool)
    assert len(examples) >= 2
    assert tool in (None, examples[0][0])
    for words in examples:
        assert words[0] in TOOLS
        parse(words)


def plan_commands() -> list[str]:
    """The commands in the pages and in ``ampipe plan --help`` that need no file of the reader."""
    commands = [command for page in PAGES for command in shell_commands(page.read_text())]
    commands += [shlex.join(["ampipe", *words]) for words in help_examples("plan")]
    shipped = "|".join(config_names("clusters"))
    plans = {one for one in commands if re.match(rf"ampipe plan .*--cluster ({shipped})", one)}
    return sorted(one for one in plans if "--recipe" not in one)


@pytest.mark.parametrize("command", plan_commands())
def test_plans_that_are_shown_can_be_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--routing" in command:
        eight_experts(tmp_path / "runs/routing")
    assert main(shlex.split(command)[1:]) == 0


def test_usage_lists_every_environment_variable_of_ours() -> None:
    sources = [*(ROOT / "megatron_ampipe").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]
    used = {name for path in sources for name in re.findall(r"\bAMPIPE_[A-Z_]+", path.read_text())}
    documented = set(re.findall(r"\bAMPIPE_[A-Z_]+", (ROOT / "docs" / "usage.md").read_text()))
    assert documented == used


@pytest.mark.parametrize("page", supported.PAGES, ids=lambda page: page.stem)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    assert supported.with_tables(page) == page.read_text(), "run: python -m tests.supported"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes all figures."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/measured"))
    return importlib.import_module("figures")


def test_figures_are_those_of_the_raw_files(figures: ModuleType) -> None:
    documents = figures.read_all()
    with_results = importlib.import_module("raw_files").has_history()
    for path, text in figures.pages(documents, with_results=with_results).items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} differs: run {figures.COMMAND}"
    if not with_results:
        pytest.skip("docs/results.md names commits, and this is no repository with its whole history")


def test_a_page_refers_to_every_claim(figures: ModuleType) -> None:
    for title, (_, page, _) in figures.CLAIMS.items():
        linked = re.findall(r"figures\.md#([\w-]+)", (ROOT / "docs" / page).read_text())
        assert figures.anchor(title) in linked, f"{page} has no link to {title}"


@pytest.mark.parametrize(
    ("page", "figure", "changed"),
    [
        ("README.md", "| 1.32 (", "| 1.92 ("),
        ("docs/gpu.md", "| 756 |", "| 256 |"),
        ("docs/gpu.md", "| FAILED |", "| ok |"),
        ("docs/partners.md", "| 1.63 (", "| 1.83 ("),
        ("docs/memory.md", "| 36% |", "| 26% |"),
        ("docs/measured.md", "| 3.81x |", "| 4.81x |"),
    ],
)
def test_a_changed_figure_is_found(figures: ModuleType, page: str, figure: str, changed: str) -> None:
    text = (ROOT / page).read_text()
    assert figure in text
    assert figures.with_blocks(page, text.replace(figure, changed), figures.read_all()) == text


def test_a_raw_file_without_a_page_and_a_page_without_its_block_are_found(figures: ModuleType) -> None:
    documents = figures.read_all()
    with pytest.raises(ValueError, match=r"unused\.json is used by no page"):
        figures.pages({**documents, "unused": {}}, with_results=False)
    with pytest.raises(ValueError, match=r"README\.md lacks the line"):
        figures.with_blocks("README.md", "# Without a table", documents)
    readme = (ROOT / "README.md").read_text()
    with pytest.raises(ValueError, match=r"\['results', 'others'\]"):
        figures.with_blocks("README.md", f"{readme}<!-- begin: {figures.COMMAND} (others) -->", documents)


def test_raw_files_are_in_one_folder_and_the_index_has_all_of_them() -> None:
    results = ROOT / "docs/measured/results"
    assert {path.parent for path in (ROOT / "docs").rglob("*.json")} == {results}
    index = (ROOT / "docs/results.md").read_text()
    by_page, by_file = index.split("\n## By file\n")
    for path in results.glob("*.json"):
        link = f"[{path.stem}](measured/results/{path.name})"
        assert link in by_page.split("\n## Commits")[0] and f"\n| {link} |" in by_file, path.name


def test_every_measured_profile_is_used() -> None:
    users = [
        path.read_text()
        for pattern in ("docs/measured/results/*.json", "docs/measured/*.py", "tests/**/*.py")
        for path in ROOT.glob(pattern)
    ]
    # The script of predicted reductions reads one for each of its links.
    generic = {"profile-100mbit", "profile-200mbit"}
    for profile in (ROOT / "docs/measured/results").glob("*.yaml"):
        assert profile.stem in generic or any(profile.name in text for text in users), profile.name


TYPED_BY_HAND = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:x\b|\s?%|\s(?:ms|us|s|seconds?|minutes?|times)\b)")
"""What a measured figure looks like: a speedup, a share, a time."""
WRITTEN = ("docs/figures.md", "docs/results.md", "docs/papers.md")
"""Pages that are a script's alone."""
NOT_MEASURED = {
    "docs/planner.md": {"1 %", "20 %"},
    "docs/reductions.md": {"1 %"},
    "docs/slurm.md": {"300 s", "30 s"},
    "docs/weights.md": {"1 %"},
}
"""Rules of a choice, values of an option or of other programs."""


def typed_by_hand(text: str) -> set[str]:
    """Figures of a page that stand in its prose, not in a table that a command writes."""
    written = re.sub(r"<!-- begin: .*?<!-- end -->", "", text, flags=re.S)
    return set(TYPED_BY_HAND.findall(without_code(written)))


@pytest.mark.parametrize("page", [name for name in PAGE_IDS if not name.startswith((*WRITTEN, "docs/log/2"))])
def test_no_measured_figure_is_typed_by_hand(page: str) -> None:
    assert typed_by_hand((ROOT / page).read_text()) == NOT_MEASURED.get(page, set())


def test_a_figure_typed_by_hand_is_found() -> None:
    text = "<!-- begin: x -->1.2x<!-- end --> is 1.42x, 91 % of 32.5 ms, 3.2 times; `4x`, FP8, 2-3 x, 0.19"
    assert typed_by_hand(text) == {"1.42x", "91 %", "32.5 ms", "3.2 times"}


OWN_PAGES = [name for name in PAGE_IDS if name not in WRITTEN and not name.startswith("docs/log/")]
"""Without commands of an earlier day."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_OTHER_PROGRAMS = {
    *("--nproc-per-node", "--standalone"),  # torchrun
    *("--no-build-isolation", "--no-deps", "--no-isolation"),  # pip and build
    *("--cpp", "--cuda"),  # the beginnings of apex's --cpp_ext and --cuda_ext
    *("--dependency", "--exclude", "--mem", "--qos"),  # sbatch
    *("--apply_rope_fusion", "--apply", "--custom-megatron-init-path", "--external", "--use-routing-replay"),
}
"""The last line: of verl, ms-swift and slime; the parts before an underscore are read as flags."""


@functools.cache
def known_flags() -> frozenset[str]:
    """The flags of Megatron's parser, of AMPipe, of every tool and of the scripts."""
    from gpu_check.__main__ import _parser as gpu_check
    from megatron_ampipe.tools.quickstart import _parser as quickstart
    from soak.__main__ import _parser as soak

    parsers = [flags.full_parser(), gpu_check(), quickstart(), soak(), *map(parser_of, TOOLS)]
    return frozenset(flag for parser in parsers for flag in parser._option_string_actions)


def parser_of(tool: str) -> argparse.ArgumentParser:
    """The parser of one tool, with those of its sub-commands."""
    (commands,) = (
        action for action in build_parser(tool)._actions if isinstance(action, argparse._SubParsersAction)
    )
    parser = commands.choices[tool]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                parser._option_string_actions |= each._option_string_actions
    return parser


def unknown_flags(text: str) -> set[str]:
    """Flags of a text that no program has."""
    return set(FLAG.findall(text)) - known_flags() - OF_OTHER_PROGRAMS - NO_FLAGS.keys()


@pytest.mark.parametrize("page", ["CHANGELOG.md", *OWN_PAGES])
def test_every_flag_of_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert unknown_flags(text) == set()
    for tool, words in re.findall(r"\bampipe ([a-z]+)((?:[^`\n]|\\\n)*)", text):
        # Of a job script, the words after -- are those of the training.
        if tool in TOOLS and tool != "sbatch":
            given = {flag for flag in FLAG.findall(words.split(" | ")[0]) if not flag.startswith("--ampipe-")}
            assert given <= parser_of(tool)._option_string_actions.keys(), f"{page}: ampipe {tool} {words}"


def test_a_flag_that_does_not_exist_is_found() -> None:
    assert unknown_flags(
        "`--ampipe-degrees 2`, `--reduce-scatter-with-fp32-accumulation`, `--num-experts`"
    ) == {
        "--ampipe-degrees",
        "--reduce-scatter-with-fp32-accumulation",
    }


def test_every_ampipe_flag_of_configs_scripts_and_sources_exists() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser())
    for folder in ("configs", "scripts", "megatron_ampipe", "docs/measured", "patches"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in {".yaml", ".sh", ".sbatch", ".py", ".j2", ".md", ".patch"}:
                named = set(re.findall(r"--ampipe-[a-z-]*[a-z]", path.read_text())) - NO_FLAGS.keys()
                assert named <= parser._option_string_actions.keys(), path


def test_examples_start_with_degree_2() -> None:
    for page in OWN_PAGES:
        blocks = "".join(
            re.findall(r"^```(?:sh|bash|diff|python|yaml)\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
        )
        assert set(re.findall(r"--ampipe-degree (\d+)|\bdegree[=:] ?(\d+)", blocks)) <= {
            ("2", ""),
            ("", "2"),
        }, page
