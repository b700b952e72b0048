from __future__ import annotations

from node import cgroup, stack

DEB822 = """\
Types: deb
# a comment
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm
 bookworm-updates
Components: main
"""


def etc(tmp_path, os_release="ID=debian\nVERSION_CODENAME=bookworm\n", **files):
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text(os_release)
    for name, text in files.items():
        path = tmp_path / "apt" / ("sources.list" if name == "one_line" else f"sources.list.d/x.{name}")
        path.write_text(text)
    return tmp_path


def test_the_mirror_comes_from_deb822_sources_and_is_not_the_one_for_security(tmp_path):
    assert stack.mirror(etc(tmp_path, sources=DEB822)) == "http://mirror.example/debian"


def test_the_mirror_comes_from_a_sources_list_with_options_and_comments(tmp_path):
    text = (
        "# deb http://no.example bookworm main\ndeb [arch=amd64 trusted=yes] https://a.example/debian bookworm main\n"
    )
    assert stack.mirror(etc(tmp_path, one_line=text)) == "https://a.example/debian"


def test_a_third_partys_repository_is_not_taken_for_the_mirror(tmp_path):
    assert stack.mirror(etc(tmp_path, list="deb http://third.example/apt stable main\n")) is None


def test_a_disabled_source_is_not_taken_for_the_mirror(tmp_path):
    text = DEB822.replace("Types: deb deb-src", "Enabled: no\nTypes: deb")
    assert stack.mirror(etc(tmp_path, sources=text)) is None


def test_on_another_distribution_mmdebstraps_own_mirror_is_used(tmp_path):
    release = 'ID=ubuntu\nVERSION_CODENAME="noble"\n'
    text = "deb http://ubuntu.example/ubuntu noble main\n"
    there = etc(tmp_path, release, one_line=text)
    assert stack.mirror(there) is None
    assert stack.mirror(there, distribution="ubuntu") == "http://ubuntu.example/ubuntu"


def test_a_version_is_found_in_what_a_program_says():
    assert stack.version("containerd github.com/containerd/containerd/v2 2.1.9+unknown ") == (2, 1, 9)
    assert stack.version("Version: 4.3\n") == (4, 3)
    assert stack.version("nothing") == (0,)


def test_another_recipe_has_another_digest():
    recipe = stack.RECIPES["trixie"]
    assert recipe.digest() == stack.RECIPES["trixie"].digest()
    assert recipe._replace(packages=(*recipe.packages, "sl")).digest() != recipe.digest()


MOUNTINFO = """\
30 20 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,xattr,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd,release_agent=/x
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
34 20 0:30 / /elsewhere/cgroup rw - cgroup2 cgroup2 rw
"""


def test_every_cgroup_hierarchy_is_found_with_the_options_that_mount_it_again():
    assert cgroup.hierarchies(MOUNTINFO) == [
        ("/sys/fs/cgroup/cpu", "cgroup", "cpu,cpuacct"),
        ("/sys/fs/cgroup/systemd", "cgroup", "none,name=systemd"),
        ("/sys/fs/cgroup/unified", "cgroup2", ""),
    ]


def test_a_pure_version_2_machine_has_one_hierarchy():
    line = "30 20 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
    assert cgroup.hierarchies(line) == [("/sys/fs/cgroup", "cgroup2", "")]
