"""What the documentation says of the code, and of itself, is so."""

from __future__ import annotations

import re

import pytest

from node.stack import PROJECT
from shim.bundle import _VALUES, RESTORE_FROM
from shim.cli import COMMANDS
from shim.metrics import FAMILIES

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
