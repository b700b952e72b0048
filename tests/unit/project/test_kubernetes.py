"""The manifests for a cluster: fields that Kubernetes knows, and names that fit one another.

The schemas are of the kinds that are used here, and of their fields alone: a field that is not in them is a misspelt
one, or one to be added here from the API's reference.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from node.stack import PROJECT
from shim.bundle import _VALUES

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

FOLDER = PROJECT / "packaging/kubernetes"
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
# Values that are not strings are what YAML makes of an unquoted yes or 1, and are refused by the API server.
LABELS = {"type": "object", "patternProperties": {KEY: TEXT}, "additionalProperties": False}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9]+(m|[KMG]i)?$"}]},
}


def record(*required, **fields):
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def listed(item):
    return {"type": "array", "items": item, "minItems": 1}


META = record("name", name=NAME, namespace=NAME, labels=LABELS, annotations=LABELS)
PROBE = record(
    exec=record("command", command=TEXTS),
    tcpSocket=record("port", port={"type": "integer"}),
    periodSeconds={"type": "integer"},
    timeoutSeconds={"type": "integer"},
    failureThreshold={"type": "integer"},
)
CONTAINER = record(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    command=TEXTS,
    ports=listed(record("containerPort", containerPort={"type": "integer"})),
    env=listed(record("name", name={"type": "string", "pattern": r"^[A-Z_]+$"}, value=TEXT)),
    readinessProbe=PROBE,
    resources=record(requests=QUANTITIES, limits=QUANTITIES),
    securityContext=record(privileged={"type": "boolean"}),
    volumeMounts=listed(record("name", "mountPath", name=NAME, mountPath={"type": "string", "pattern": "^/"})),
)
VOLUME = record(
    "name",
    name=NAME,
    configMap=record("name", name=NAME),
    hostPath=record("path", path=TEXT, type={"enum": ["Directory", "DirectoryOrCreate", "File", "Socket"]}),
)
POD = record(
    "containers",
    runtimeClassName=NAME,
    nodeSelector=LABELS,
    tolerations=listed(record(operator={"enum": ["Exists", "Equal"]}, key=TEXT, value=TEXT, effect=TEXT)),
    priorityClassName={"enum": ["system-node-critical", "system-cluster-critical"]},
    automountServiceAccountToken={"type": "boolean"},
    hostPID={"type": "boolean"},
    initContainers=listed(CONTAINER),
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
)
TEMPLATE = record("metadata", "spec", metadata=record("labels", labels=LABELS, annotations=LABELS), spec=POD)
SELECTOR = record("matchLabels", matchLabels=LABELS)
KINDS = {
    ("node.k8s.io/v1", "RuntimeClass"): {
        "handler": NAME,
        "scheduling": record(nodeSelector=LABELS, tolerations=POD["properties"]["tolerations"]),
    },
    ("apps/v1", "Deployment"): {
        "spec": record("selector", "template", replicas={"type": "integer"}, selector=SELECTOR, template=TEMPLATE)
    },
    ("apps/v1", "DaemonSet"): {"spec": record("selector", "template", selector=SELECTOR, template=TEMPLATE)},
}
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def read(name):
    (one,) = yaml.safe_load_all((FOLDER / name).read_text())
    return one


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_the_fields_of_its_kind(path):
    for object_ in yaml.safe_load_all(path.read_text()):
        fields = KINDS[object_["apiVersion"], object_["kind"]]
        schema = record("apiVersion", "kind", "metadata", *fields, apiVersion=TEXT, kind=TEXT, metadata=META, **fields)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(object_, schema)


@pytest.mark.parametrize("name", ["deployment.yaml", "daemonset.yaml"])
def test_a_workload_selects_its_own_pods_and_mounts_its_own_volumes(name):
    spec = read(name)["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    pod = spec["template"]["spec"]
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    assert {mount["name"] for one in containers for mount in one.get("volumeMounts", [])} == volumes
    assert len({one["name"] for one in containers}) == len(containers)


def test_the_runtime_class_the_drop_ins_and_the_workloads_name_one_another():
    runtime = read("runtimeclass.yaml")
    for version in (2, 3):
        text = (PROJECT / f"packaging/containerd/fermata-v{version}.toml").read_text()
        assert f".containerd.runtimes.{runtime['handler']}]" in text
    assert read("deployment.yaml")["spec"]["template"]["spec"]["runtimeClassName"] == runtime["metadata"]["name"]
    # Pods of the class go where the DaemonSet sets nodes up.
    setup = read("daemonset.yaml")["spec"]["template"]["spec"]
    assert setup["nodeSelector"] == runtime["scheduling"]["nodeSelector"]


def test_the_deployments_annotations_are_fermatas_and_for_its_containers():
    template = read("deployment.yaml")["spec"]["template"]
    names = [one["name"] for one in template["spec"]["containers"]]
    for annotation in template["metadata"]["annotations"]:
        key, _, container = annotation.partition(".")
        assert key in _VALUES and container in names


def test_the_daemonset_runs_the_script_with_what_the_config_map_holds():
    text = (FOLDER / "daemonset.yaml").read_text()
    made = re.search(r"create configmap (\S+) (.*?)\napiVersion", text, re.S)
    assert made
    files = re.findall(r"--from-file=(?:([\w.]+)=)?(\S+)", made[2])
    keys = {key or path.rpartition("/")[2] for key, path in files}
    spec = read("daemonset.yaml")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["package"]["configMap"]["name"] == made[1]
    script = spec["initContainers"][0]["command"][-1]
    assert {word.rpartition("/")[2] for word in script.split() if word.startswith("/package/")} == keys
    seen_by_the_node = volumes["node"]["hostPath"]["path"]
    run = [word for word in script.split() if word.startswith("/run/")]
    assert run == [f"{seen_by_the_node}/node-setup.sh", f"{seen_by_the_node}/fermata.deb"]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=20)
    assert all((PROJECT / path).exists() for _, path in files if not path.startswith("dist/"))


def test_the_package_fits_into_a_config_map(tmp_path):
    # The API server refuses more than 1 MiB, and counts it in base64.
    built = subprocess.run(
        ["python3", str(PROJECT / "packaging/deb/build.py"), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    size = next(tmp_path.glob("*.deb")).stat().st_size
    assert built.stdout and size * 4 / 3 < 900_000


def test_snippets_for_the_node_say_what_doctor_looks_at():
    from shim import doctor

    huge = (PROJECT / "packaging/tmpfiles/huge-pages.conf").read_text().splitlines()[-1].split()
    assert huge[:2] == ["w", doctor._HUGE_PAGES] and huge[-1] == "madvise"
    overlay = (PROJECT / "packaging/modprobe/fermata-overlay.conf").read_text().splitlines()[-1].split()
    assert overlay[:2] == ["options", "overlay"]
    assert {word.removesuffix("=N") for word in overlay[2:]} == {"redirect_dir", "metacopy", "index", "nfs_export"}
