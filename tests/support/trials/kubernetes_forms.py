"""Which fields the manifests may have, as far as they are used: facts of the resource definitions of JobSet
(jobset.x-k8s.io/v1alpha2, 0.9 to 0.13) and PyTorchJob (kubeflow.org/v1, training operator 1.7 to 1.9).

A form is a type, a set of allowed values, a list of one form, or a dict of fields; a field whose name ends with `!` has
to be there, and `*` stands for any name. What the resource does not know, the API server drops or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

QUANTITY = (int, str)
ENVIRONMENT = [
    {
        "name!": str,
        "value": str,
        "valueFrom": {"secretKeyRef": {"name!": str, "key!": str}, "fieldRef": {"fieldPath!": str}},
    }
]
POD = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int},
    "containers!": [
        {
            "name!": str,
            "image": str,
            "command": [str],
            "args": [str],
            "env": ENVIRONMENT,
            "resources": {"limits": {"*": QUANTITY}},
            "volumeMounts": [{"name!": str, "mountPath!": str}],
        }
    ],
    "volumes": [{"name!": str, "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": QUANTITY}}],
}
JOBSET = {
    "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
    "kind!": {"JobSet"},
    "metadata!": {"name!": str},
    "spec!": {
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
        },
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "replicatedJobs": [
            {
                "name!": str,
                "replicas": int,
                "template!": {
                    "spec": {
                        "parallelism": int,
                        "completions": int,
                        "completionMode": {"Indexed", "NonIndexed"},
                        "backoffLimit": int,
                        "template!": {"spec": POD},
                    }
                },
            }
        ],
    },
}
PYTORCHJOB = {
    "apiVersion!": {"kubeflow.org/v1"},
    "kind!": {"PyTorchJob"},
    "metadata!": {"name": str, "generateName": str},
    "spec!": {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
        "elasticPolicy": {"rdzvBackend": str, "minReplicas": int, "maxReplicas": int, "maxRestarts": int},
        "pytorchReplicaSpecs!": {
            "Worker!": {
                "replicas": int,
                "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
                "template": {"spec": POD},
            }
        },
    },
}


def problems(value: Any, form: Any, place: str = "") -> Iterator[str]:
    """What does not fit: places with an unknown or missing field, or a value of another type."""
    if isinstance(form, dict) and isinstance(value, dict):
        required = {name[:-1] for name in form if name.endswith("!")}
        known = {name.rstrip("!"): inner for name, inner in form.items()}
        yield from (f"{place}.{name} is missing" for name in sorted(required - value.keys()))
        for name, inner in value.items():
            if name in known or "*" in known:
                yield from problems(inner, known.get(name, known.get("*")), f"{place}.{name}")
            else:
                yield f"{place}.{name} is unknown"
    elif isinstance(form, list) and isinstance(value, list):
        for number, inner in enumerate(value):
            yield from problems(inner, form[0], f"{place}[{number}]")
    elif isinstance(form, set):
        if value not in form:
            yield f"{place} is {value!r}"
    elif isinstance(form, dict | list) or not isinstance(value, form) or (form is int and isinstance(value, bool)):
        yield f"{place} is {value!r}"
