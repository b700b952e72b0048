"""The .deb: installed in a node it makes the runtime work, and purged it leaves the node as it was."""

from __future__ import annotations

import subprocess

import pytest

from node.containers import IMAGE, OURS, pid, remove, start, status

# What dpkg, containerd and Python themselves write. /usr/local is another installation's.
NOT_OURS = (
    "var/lib/dpkg/",
    "var/lib/containerd/",
    "var/log/",
    "var/cache/",
    "usr/local/",
    "etc/containerd/",
    "etc/cni/",
)


def files(node):
    """Every file of the node's system, with what makes it that file."""
    kinds = ["-type", "d", "-printf", "%p %m %u\\n", "-o", "-printf", "%p %m %u %s %l\\n"]
    listed = node.exec(["find", "/usr", "/etc", "/var", "/opt", *kinds], timeout=120).stdout
    return {line for line in listed.splitlines() if not line.startswith(tuple(f"/{path}" for path in NOT_OURS))}


def test_the_package_works_and_leaves_nothing(bare, package):
    before = files(bare)
    inside = bare.path("/srv") / package.name
    inside.write_bytes(package.read_bytes())
    bare.exec(["dpkg", "--install", f"/srv/{package.name}"], timeout=120)
    assert bare.exec(["containerd-shim-fermata-v1", "-v"]).stdout.split()[-1] == OURS
    compiled = bare.exec(["find", "/usr/lib/fermata", "-name", "snapshot.cpython-*.pyc"]).stdout
    assert len(compiled.splitlines()) == 1
    bare.exec(["fermata", "doctor"], check=False)
    start(bare, "song")
    bare.exec(["fermata", "checkpoint", "song", "/srv/song"])
    start(bare, "again", options=["--annotation", "fermata/restore-from=/srv/song"])
    assert status(bare, "again") == "RUNNING"
    remove(bare, "again")

    # What serves a running container is in memory: it outlives the package.
    first = pid(bare, "song")
    bare.path("/etc/containerd/conf.d/differ.toml").write_text('# address = "/run/fermata-differ/differ.sock"\n')
    said = bare.exec(["dpkg", "--purge", "fermata"], timeout=60).stderr
    assert "containerd's configuration still names fermata-differ" in said
    assert (status(bare, "song"), pid(bare, "song")) == ("RUNNING", first)
    assert bare.ctr("tasks", "exec", "--exec-id", "x", "song", "echo", "works").stdout == "works\n"
    remove(bare, "song")
    assert sorted(files(bare) ^ before) == []
    assert bare.exec(["ls", "/srv/song/fermata.json"]), "snapshots are the operator's"
    with pytest.raises(Exception, match=r"fermata"):
        bare.ctr("run", "--rm", "--runtime", OURS, IMAGE, "none", "true")


def test_the_package_can_be_read_by_those_who_look_at_it_first(package):
    listed = subprocess.run(["dpkg-deb", "-c", str(package)], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    assert {line[1] for line in lines} == {"root/root"}
    assert all(line[0] in ("drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x") for line in lines)
    names = {line[5] for line in lines}
    assert not [name for name in names if "__pycache__" in name or name.startswith("./usr/local")]
    assert {"./usr/share/man/man1/fermata.1.gz", "./usr/share/bash-completion/completions/fermata"} < names


def test_completion_offers_the_commands_and_their_options(package, tmp_path):
    subprocess.run(["dpkg-deb", "-x", str(package), str(tmp_path)], check=True)
    asked = (
        f"source {tmp_path}/usr/share/bash-completion/completions/fermata;"
        'COMP_WORDS=(fermata "$1" "$2"); COMP_CWORD=${3}; _fermata; echo "${COMPREPLY[@]}"'
    )

    def offers(*words):
        return subprocess.run(
            ["bash", "-c", asked, "bash", *words], check=True, capture_output=True, text=True
        ).stdout.split()

    assert offers("che", "", "1") == ["checkpoint", "check"]
    assert "--leave-running" in offers("checkpoint", "--l", "2")


def test_the_manual_page_is_one(package, tmp_path):
    subprocess.run(["dpkg-deb", "-x", str(package), str(tmp_path)], check=True)
    page = subprocess.run(
        ["zcat", str(tmp_path / "usr/share/man/man1/fermata.1.gz")], check=True, capture_output=True, text=True
    ).stdout
    assert page.startswith('.TH FERMATA 1 "" "fermata ')
    assert ".SS checkpoint" in page
    for line in page.splitlines():
        assert line[:1] != "'" and "%(" not in line
        assert not line.startswith(".") or line.split()[0] in (".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".BR", ".I")
