"""What the documentation says of the code, and of itself, is so."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from node.stack import PROJECT
from shim.bundle import _VALUES, RESTORE_FROM
from shim.cli import COMMANDS, parser
from shim.metrics import FAMILIES
from tests import documentation

PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")])


def anchors(path):
    """The names that a Markdown renderer gives to headings."""
    for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE):
        yield re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    # Code is no link, but a link's text may be code: `[`x`](y)`.
    text = re.sub(r"^    .*$|(\[`[^`]*`\])|`[^`]*`", r"\1", page.read_text(), flags=re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_no_command_of_a_page_that_is_run_is_a_whole_run_of_its_own():
    run = [command.text for scenario in documentation.SCENARIOS for command in scenario.commands()]
    assert [text for text in run if re.match(r"(\w+=\S+ )*make (?!deb\b|install\b)", text)] == []


def test_the_operators_page_has_every_annotation_with_its_values():
    rows = dict(re.findall(r"^\| `(fermata/[a-z-]+)` \| (.*?) \|", (PROJECT / "docs/operator.md").read_text(), re.M))
    documented = {key: tuple(re.findall(r"`([^`]+)`", values)) for key, values in rows.items()}
    assert documented == {key: values or () for key, values in _VALUES.items()}
    assert documented[RESTORE_FROM] == ()


def test_the_commands_page_has_every_command():
    text = (PROJECT / "docs/cli.md").read_text()
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []


def test_the_two_versions_of_containerds_configuration_say_the_same():
    folder = PROJECT / "packaging/containerd"
    new, old = ((folder / f"fermata-v{version}.toml").read_text() for version in (3, 2))
    tables = new.replace("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri").partition("version = 3")[2]
    assert tables in old.partition("version = 2")[2]


def test_the_page_on_observability_has_every_metric_with_its_type():
    text = (PROJECT / "docs/observability.md").read_text()
    rows = dict(re.findall(r"^\| `(fermata_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {name: family.kind for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", ["docs/observability.md", "packaging/prometheus/fermata-alerts.yaml"])
def test_queries_and_alerts_ask_for_metrics_that_there_are(name):
    samples = set(FAMILIES)
    for metric, family in FAMILIES.items():
        if family.kind in ("histogram", "summary"):
            samples |= {f"{metric}_sum", f"{metric}_count"} | ({f"{metric}_bucket"} if family.buckets else set())
    asked = set(re.findall(r"\bfermata_[a-z_]+\b", (PROJECT / name).read_text()))
    assert asked <= samples
    assert len(asked) >= 8


def test_every_command_is_run_by_a_test_or_has_a_reason_not_to_be():
    run = {one for scenario in documentation.SCENARIOS for one in scenario.commands()}
    named = {(one.page, one.text) for one in documentation.commands()}
    left = [
        f"{one.where}: {one.text}"
        for one in documentation.commands()
        if one not in run and (one.page, one.text) not in documentation.NOT_RUN
    ]
    unknown = [
        f"{one.where}: {one.text}" for one in documentation.commands() if one.program not in documentation.PROGRAMS
    ]
    assert unknown == [], "these lines are neither data nor commands that tests/documentation.py knows"
    assert left == [], "tests/documentation.py says how a command of the documentation is run"
    assert set(documentation.NOT_RUN) - named == set(), "these are not in the documentation any more"
    sections = {one.where for one in documentation.commands()}
    assert [s for s in documentation.SCENARIOS for name in s.sections if f"{s.page}:{name}" not in sections] == []


def test_the_syntax_of_the_commands_is_their_parsers():
    lines = [line for where, line in syntax() if line.startswith("fermata ")]
    shown = {}
    for line in lines:
        words = line.removeprefix("fermata ").split()
        names = [words[0].rstrip(","), *(words[1:2] if words[0].endswith(",") else [])]
        shown.update({name: set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)) for name in names})
    assert set(shown) == set(COMMANDS)
    for name, options in shown.items():
        top = parser(name)
        choices = next(action.choices for action in top._actions if action.dest == "command")
        # Every option but those that all have, or that the page tells of beside.
        there = {option for action in choices[name]._actions for option in action.option_strings}
        assert options <= there, name
        assert {option for option in there if option.startswith("--")} - options <= {
            "--help",
            "--address",
            "--namespace",
        }


def test_the_syntax_of_the_layers_commands_is_their_parsers():
    for where, line in syntax():
        if line.startswith("python3 -m layerwriter "):
            name = line.split()[3]
            said = subprocess.run(
                [sys.executable, "-m", "layerwriter", name, "--help"],
                cwd=PROJECT,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
            for option in re.findall(r"--[a-z-]+", line):
                assert option in said, (name, option)


def syntax():
    for where in documentation.SYNTAX:
        page, _, section = where.partition(":")
        for heading, lines in documentation.blocks(page):
            if heading == section:
                yield from ((where, line) for line in lines)


def test_the_picture_is_drawn_within_its_bounds_and_for_dark_pages_too():
    path = PROJECT / "docs/how-it-works.svg"
    assert "](how-it-works.svg)" in (PROJECT / "docs/how-it-works.md").read_text()
    top = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    width, height = map(float, top.attrib["viewBox"].split()[2:])
    for one in top.iter(f"{space}rect"):
        x, y = float(one.get("x", 0)), float(one.get("y", 0))
        assert x + float(one.get("width")) <= width and y + float(one.get("height")) <= height
    classes = {name for one in top.iter() for name in one.get("class", "").split()}
    light, _, dark = top.find(f"{space}style").text.partition("@media (prefers-color-scheme: dark)")
    assert all(f".{name} {{" in light for name in classes)
    # A colour that is set for light pages is set for dark ones, or those would show it on the other background.
    coloured = set(re.findall(r"^ +([.#\w ]+) \{[^}]*(?:fill|stroke): #", light, re.M))
    assert coloured and coloured == set(re.findall(r"^ +([.#\w ]+) \{[^}]*(?:fill|stroke): #", dark, re.M))
    assert top.find(f"{space}title").text and top.find(f"{space}desc").text
