"""The node's store of weights: what is kept, what is removed, and what is refused."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import threading

import pytest

from shim import inspect, manifest, weights
from shim.config import Config
from shim.errors import ShimError

from .programs import CHUNK, described, hex_of

DATA = os.urandom(CHUNK * 3 + 77)
DIGEST = hex_of(DATA)


@pytest.fixture
def store(tmp_path):
    return weights.Store(str(tmp_path / "store"))


@pytest.fixture
def config(store):
    made = Config()
    made.weights_directory = store.directory
    return made


def pack(data=DATA):
    given = described(data)
    return weights.Pack("model", given["bytes"], given["chunk"], given["chunks"])


def put(store, data=DATA):
    path = store.path(hex_of(data))
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(store.rounded(len(data)))
    os.chmod(path, 0o600)
    return path


def record(*digests, token="0a"):
    packs = [{"name": "model", "digest": f"sha256:{digest}", "bytes": len(DATA)} for digest in digests]
    return {"outcome": "out", "token": token, "processes": [{"pid": 1, "packs": packs}]}


def snapshot(tmp_path, store, name, *digests):
    """A snapshot's directory, as far as the store looks at it, with its references."""
    directory = tmp_path / name
    directory.mkdir()
    data = {"version": {"major": 1, "minor": 1}, "guest": record(*digests)}
    (directory / "fermata.json").write_text(json.dumps(data))
    for digest in digests:
        store.refer(digest, weights.reference(str(directory), "0a"), str(directory))
    return directory


def outcome(store, **options):
    return store.prune(DIGEST, packed=options.pop("packed", False), **options).outcome


def test_a_pack_is_named_by_a_digest_of_its_sizes_and_chunks():
    assert pack().digest == DIGEST
    assert weights.Pack("other", len(DATA), CHUNK, pack().chunks).digest == DIGEST
    assert weights.Pack("model", len(DATA) - 1, CHUNK, pack().chunks).digest != DIGEST


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 5, len(DATA) - 1])
def test_one_bit_that_is_another_is_seen(store, at):
    path = put(store)
    assert store.has(pack())
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    assert not store.has(pack())
    fd = os.open(path, os.O_RDONLY)
    assert weights.wrong_chunk(fd, pack()) == at // CHUNK
    os.close(fd)


def test_a_file_that_is_too_short_is_not_the_pack(store):
    path = put(store)
    os.truncate(path, CHUNK)
    assert not store.has(pack())


def test_the_directory_is_roots_alone(store, tmp_path):
    assert os.stat(store.directory).st_mode & 0o777 == 0o700
    os.chmod(store.directory, 0o710)
    with pytest.raises(ShimError, match="chmod 700"):
        weights.Store(store.directory)
    (tmp_path / "file").touch()
    with pytest.raises(ShimError, match=r"name another: \[weights\] directory"):
        weights.Store(str(tmp_path / "file/below"))
    with pytest.raises(ShimError, match="must be an absolute path"):
        weights.Store("weights")


# What a restore needs -------------------------------------------------------------------------------------------------


def test_weights_that_are_there_and_whole_are_not_missing(store, config):
    put(store)
    assert weights.missing(record(DIGEST), config) == []
    assert weights.missing(None, config) == []
    assert weights.missing({"outcome": "inside", "processes": []}, config) == []


def test_what_is_missing_is_named_with_its_file(store, config):
    (sentence,) = weights.missing(record(DIGEST), config)
    assert f"sha256:{DIGEST} are not on this node: {store.path(DIGEST)} is not there" in sentence


def test_what_is_too_short_is_named_with_its_sizes(store, config):
    os.truncate(put(store), CHUNK)
    (sentence,) = weights.missing(record(DIGEST), config)
    assert f"has {CHUNK} bytes and they have {len(DATA)}" in sentence


def test_what_others_could_have_written_is_refused(store, config, tmp_path):
    os.chmod(put(store), 0o622)
    (sentence,) = weights.missing(record(DIGEST), config)
    assert "is no file of root's alone" in sentence
    os.rename(store.path(DIGEST), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store.path(DIGEST))
    assert "is no file of root's alone" in weights.missing(record(DIGEST), config)[0]


@pytest.mark.parametrize("digest", ["../../../etc/shadow", "0" * 63, "G" * 64, ""])
def test_a_digest_that_is_none_leads_nowhere(config, digest):
    assert "is no digest of weights" in weights.missing(record(digest), config)[0]
    with pytest.raises(ShimError, match="is no digest"):
        weights.hold(record(digest), config, "/srv/x")


def test_a_restore_from_a_new_place_registers_the_snapshot_there(store, config, tmp_path):
    put(store)
    weights.hold(record(DIGEST), config, str(tmp_path)).close()
    assert list(store.references(DIGEST).values()) == [str(tmp_path)]
    weights.hold(record(DIGEST), config, str(tmp_path)).close()
    assert len(store.references(DIGEST)) == 1


# Removing -------------------------------------------------------------------------------------------------------------


def test_what_a_snapshot_needs_stays(store, tmp_path):
    put(store)
    snapshot(tmp_path, store, "a", DIGEST)
    assert outcome(store) == "kept"
    assert store.digests() == [DIGEST]


def test_what_no_snapshot_needs_goes_with_all_that_there_is_of_it(store):
    put(store)
    assert outcome(store, dry_run=True) == "removed"
    assert store.digests() == [DIGEST]
    assert outcome(store) == "removed"
    assert store.known() == []


def test_a_snapshot_that_is_gone_or_another_one_by_now_needs_nothing(store, tmp_path):
    put(store)
    gone, other = (snapshot(tmp_path, store, name, DIGEST) for name in ("gone", "other"))
    (gone / "fermata.json").unlink()
    (other / "fermata.json").write_text(json.dumps({"version": {"major": 1}, "guest": record("0" * 64)}))
    assert outcome(store) == "removed"


def test_a_snapshot_that_cannot_be_read_is_taken_to_need_its_weights(store, tmp_path):
    put(store)
    (snapshot(tmp_path, store, "a", DIGEST) / "fermata.json").write_text("{")
    assert outcome(store) == "kept"


def test_a_snapshot_that_cannot_be_looked_for_is_taken_to_need_its_weights(store, tmp_path):
    put(store)
    (tmp_path / "round").symlink_to("round")  # as good as a network file system that does not answer: ELOOP, not ENOENT
    store.refer(DIGEST, "a", str(tmp_path / "round"))
    assert outcome(store) == "kept"
    assert store.size(DIGEST)


def test_a_snapshot_that_lacks_nothing_but_its_name_needs_its_weights(store, tmp_path):
    put(store)
    directory = snapshot(tmp_path, store, "whole", DIGEST)
    os.rename(directory / "fermata.json", directory / manifest.STAGED)
    assert outcome(store) == "kept"


def test_a_reference_that_goes_meanwhile_does_not_take_others_along(store):
    store.refer(DIGEST, "stays", "/srv/a")
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            store.refer(DIGEST, "passes", "/srv/b")
            store.drop(DIGEST, "passes")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all("stays" in store.references(DIGEST) for _ in range(1000))
    finally:
        over.set()
        thread.join()


def test_a_snapshot_can_be_referred_to_while_another_one_is_removed(store):
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            store.drop(DIGEST, "other")
            try:
                os.rmdir(f"{store.directory}/refs/{DIGEST}")
            except OSError:
                pass

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(500):
            store.refer(DIGEST, "mine", "/srv/a")
            store.drop(DIGEST, "mine")
    finally:
        over.set()
        thread.join()


def test_a_pack_is_gone_before_its_lock_is(store):
    """Or who takes a new lock meanwhile would find the pack, and lose it afterwards."""
    os.mkdir(store.path(DIGEST))  # cannot be unlinked
    with pytest.raises(OSError):
        store.prune(DIGEST, packed=False)
    assert os.path.exists(f"{store.directory}/locks/{DIGEST}")


@pytest.mark.parametrize("place", ["/tmp/ctrd-checkpoint17", "/var/lib/containerd/io.containerd.grpc.v1.cri/x"])
def test_what_containerd_has_packed_stays_until_it_is_asked_for(store, place):
    put(store)
    store.refer(DIGEST, weights.reference(place, "0a"), place)
    assert outcome(store) == "kept"
    assert outcome(store, packed=True) == "removed"


def test_what_a_take_or_restore_holds_stays(store, config):
    put(store)
    held = weights.Held()
    store.hold(held, DIGEST)
    assert outcome(store) == "in use"
    assert store.remove(DIGEST) is None
    held.close()
    assert outcome(store) == "removed"


def test_who_waits_for_a_pack_that_is_being_removed_holds_it_afterwards(store):
    put(store)
    removing = os.open(f"{store.directory}/locks/{DIGEST}", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(removing, fcntl.LOCK_EX)
    held = weights.Held()
    waiting = threading.Thread(target=store.hold, args=(held, DIGEST))
    waiting.start()
    os.unlink(f"{store.directory}/locks/{DIGEST}")
    os.close(removing)
    waiting.join(10)
    assert outcome(store) == "in use"
    held.close()


def test_drafts_that_nobody_writes_are_left_over(store):
    for name in ("draft-1-a", "draft-1-b"):
        with open(f"{store.directory}/{name}", "wb") as file:
            file.write(b"12345")
    mine = os.open(f"{store.directory}/draft-1-a", os.O_RDONLY)
    fcntl.flock(mine, fcntl.LOCK_EX)
    assert list(store.drafts()) == [(f"{store.directory}/draft-1-b", 5)]
    os.close(mine)


def test_prune_says_what_it_does(store, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shim.config.load", lambda: config)
    other = os.urandom(9)
    put(store)
    put(store, other)
    snapshot(tmp_path, store, "a", DIGEST)
    with open(f"{store.directory}/draft-1-b", "wb") as file:
        file.write(b"12345")

    def prune(**options):
        arguments = argparse.Namespace(**{"dry_run": False, "packed": False, "json": False, **options})
        assert weights.run(arguments) == 0
        return capsys.readouterr().out

    assert f"sha256:{hex_of(other)}: would be removed, 4.0 KiB" in prune(dry_run=True)
    found = json.loads(prune(dry_run=True, json=True))
    assert {one["digest"][7:]: one["outcome"] for one in found["weights"]} == {DIGEST: "kept", hex_of(other): "removed"}
    assert len(os.listdir(store.directory)) == 5
    assert "of a take that died" in prune()
    assert (store.digests(), list(store.drafts())) == ([DIGEST], [])
    os.unlink(tmp_path / "a/fermata.json")
    assert f"removed, 3.0 MiB; gone: {tmp_path}/a" in prune()
    assert store.known() == []


def test_prune_without_a_store_makes_none(tmp_path, monkeypatch, capsys):
    config = Config()
    config.weights_directory = str(tmp_path / "none")
    monkeypatch.setattr("shim.config.load", lambda: config)
    assert weights.run(argparse.Namespace(dry_run=False, packed=False, json=False)) == 0
    assert not (tmp_path / "none").exists()


def test_rm_takes_along_what_only_its_snapshot_needs(store, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shim.config.load", lambda: config)
    other = os.urandom(9)
    put(store)
    put(store, other)
    snapshot(tmp_path, store, "a", DIGEST, hex_of(other))
    snapshot(tmp_path, store, "b", DIGEST)
    inspect.rm(argparse.Namespace(directories=[str(tmp_path / "a")], unfinished=False))
    assert "4.0 KiB of weights with it" in capsys.readouterr().out
    assert store.digests() == [DIGEST]
    held = weights.Held()
    store.hold(held, DIGEST)
    inspect.rm(argparse.Namespace(directories=[str(tmp_path / "b")], unfinished=False))
    assert "1 of its weights are in use and stay: `fermata prune`" in capsys.readouterr().out
    held.close()
    assert outcome(store) == "removed"


def test_what_failed_takes_leave_is_removed_without_a_word(store, config, monkeypatch, capsys):
    """A lock, and a reference that was never given its name."""
    monkeypatch.setattr("shim.config.load", lambda: config)
    held = weights.Held()
    store.hold(held, DIGEST)
    held.close()
    folder = f"{store.directory}/refs/{DIGEST}"
    os.mkdir(folder)
    os.symlink("/srv/x", f"{folder}/.0a")
    assert weights.run(argparse.Namespace(dry_run=False, packed=False, json=False)) == 0
    assert capsys.readouterr().out == f"{store.directory}: 0 B removed; 0 B in 0 files left\n"
    assert store.known() == []


def test_a_reference_that_was_never_named_goes_beside_those_that_were(store, tmp_path):
    put(store)
    snapshot(tmp_path, store, "a", DIGEST)
    os.symlink("/srv/x", f"{store.directory}/refs/{DIGEST}/.0a")
    assert outcome(store, dry_run=True) == "kept"
    assert len(os.listdir(f"{store.directory}/refs/{DIGEST}")) == 2
    assert outcome(store) == "kept"
    assert len(os.listdir(f"{store.directory}/refs/{DIGEST}")) == 1


def test_a_lock_goes_only_where_there_is_no_pack(store):
    held = weights.Held()
    store.hold(held, DIGEST)
    store.let_go(DIGEST)
    assert store.known() == [DIGEST]
    held.close()
    put(store)
    store.let_go(DIGEST)
    assert len(os.listdir(f"{store.directory}/locks")) == 1
    os.unlink(store.path(DIGEST))
    store.let_go(DIGEST)
    assert store.known() == []


def test_a_store_whose_file_system_is_not_mounted_is_told_of_and_left_empty(tmp_path):
    config = Config()
    config.weights_directory = str(tmp_path)
    (sentence,) = weights.missing(record(DIGEST), config)
    assert f"{tmp_path}/{DIGEST}.weights is not there; copy it from the node" in sentence
    assert f"{tmp_path} is empty and no mount point: if a file system with weights belongs there, mount it" in sentence
    assert os.listdir(tmp_path) == []
    store = weights.Store(str(tmp_path))
    put(store, b"other")
    (sentence,) = weights.missing(record(DIGEST), config)
    assert "mount" not in sentence


@pytest.fixture
def read_only(store, tmp_path):
    """What is in the store, where nobody can write; with nothing but packs in it."""
    if os.geteuid() != 0:
        pytest.skip("to mount takes root")
    put(store)
    for name in ("refs", "locks"):
        os.rmdir(f"{store.directory}/{name}")
    path = str(tmp_path / "mounted")
    os.mkdir(path, 0o700)
    subprocess.run(["mount", "--bind", store.directory, path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
    made = Config()
    made.weights_directory = path
    yield made
    subprocess.run(["umount", path], check=True)


def test_a_store_that_is_mounted_read_only_serves_restores(read_only, tmp_path):
    assert weights.missing(record(DIGEST), read_only) == []
    held = weights.hold(record(DIGEST), read_only, str(tmp_path))
    assert held.digests == [DIGEST]
    held.close()
    store = weights.Store(read_only.weights_directory)
    assert store.has(pack())
    with pytest.raises(ShimError, match="is mounted read-only, and the weights are not in it yet"):
        store.make_room(1)
    assert weights.forget(record(DIGEST), read_only, str(tmp_path)) == (0, 0)
    assert os.listdir(store.directory) == [f"{DIGEST}.weights"]


@pytest.mark.parametrize(("sizes", "text"), [([], "0 B in 0 files"), ([4096], "4.0 KiB in 1 file")])
def test_packs_are_told_as_files(sizes, text):
    assert weights.in_files(sizes) == text
