"""What the two service accounts may do: exactly what their Roles list, and nothing of what is dangerous."""

import pytest

pytestmark = pytest.mark.e2e
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
ACCOUNT = "system:serviceaccount:kvpilot:{}"
EVERYONE = {  # granted to every authenticated user by the cluster itself
    ("create", "selfsubjectaccessreviews"),
    ("create", "selfsubjectrulesreviews"),
}
OPERATOR = {
    *((verb, "kvpolicies") for verb in ("get", "list", "watch")),
    ("update", "kvpolicies/status"),
    *((verb, kind) for verb in ("get", "list", "watch") for kind in ("deployments", "statefulsets")),
    ("list", "pods"),
    *((verb, "configmaps") for verb in ("get", "create", "update")),
    ("create", "events"),
    *((verb, "leases") for verb in ("get", "create", "update")),
}


def all_resources(server) -> list[tuple[str, str]]:
    """Group and name of everything that the API server serves, subresources included."""
    lists = [("", server.call("GET", "/api/v1"))]
    for group in server.call("GET", "/apis")["groups"]:
        version = group["preferredVersion"]["groupVersion"]
        lists.append((group["name"], server.call("GET", f"/apis/{version}")))
    return [(group, each["name"]) for group, found in lists for each in found["resources"]]


def is_allowed(
    server, account: str, verb: str, group: str, resource: str, namespace: str, name: str = ""
) -> bool:
    kind, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": subresource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": ACCOUNT.format(account),
            "groups": ["system:serviceaccounts", "system:serviceaccounts:kvpilot", "system:authenticated"],
            "resourceAttributes": {**attributes, "namespace": namespace, "name": name},
        },
    }
    answer = server.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return answer["status"]["allowed"]


def allowed(server, account: str, namespace: str = "kvpilot", name: str = "") -> set[tuple[str, str]]:
    found = {
        (verb, resource)
        for group, resource in all_resources(server)
        for verb in VERBS
        if is_allowed(server, account, verb, group, resource, namespace, name)
    }
    return found - EVERYONE


def test_the_operator_may_do_what_its_role_lists_and_nothing_else(cluster):
    assert allowed(cluster.server, "kvpilot-operator") == OPERATOR


def test_the_sidecar_may_read_its_own_document_and_nothing_else(cluster):
    read = {(verb, "configmaps") for verb in ("get", "list", "watch")}
    assert allowed(cluster.server, "kvpilot-engine") == set()
    assert allowed(cluster.server, "kvpilot-engine", name="kvpilot-engine-control") == read


@pytest.mark.parametrize("account", ["kvpilot-operator", "kvpilot-engine"])
def test_neither_may_do_anything_in_another_namespace(cluster, account):
    for group, resource in all_resources(cluster.server):
        for verb in VERBS:
            name = (verb, resource)
            granted = is_allowed(cluster.server, account, verb, group, resource, "default")
            assert not granted or name in EVERYONE, name


DANGEROUS = [
    ("GET", "/api/v1/namespaces/kvpilot/secrets"),
    ("GET", "/api/v1/secrets"),
    ("POST", "/api/v1/namespaces/kvpilot/pods"),
    ("POST", "/api/v1/namespaces/kvpilot/pods/{pod}/exec"),
    ("POST", "/api/v1/namespaces/kvpilot/pods/{pod}/eviction"),
    ("PATCH", "/api/v1/namespaces/kvpilot/pods/{pod}"),
    ("DELETE", "/api/v1/namespaces/kvpilot/pods/{pod}"),
    ("GET", "/api/v1/namespaces/kvpilot/pods/{pod}/log"),
    ("PATCH", "/apis/apps/v1/namespaces/kvpilot/deployments/{name}"),
    ("PATCH", "/apis/apps/v1/namespaces/kvpilot/deployments/{name}/scale"),
    ("DELETE", "/apis/apps/v1/namespaces/kvpilot/deployments/{name}"),
    ("PATCH", "/apis/kvpilot.dev/v1alpha1/namespaces/kvpilot/kvpolicies/{name}"),
    ("DELETE", "/apis/kvpilot.dev/v1alpha1/namespaces/kvpilot/kvpolicies/{name}"),
    ("DELETE", "/api/v1/namespaces/kvpilot/configmaps/{name}-control"),
    ("POST", "/api/v1/namespaces/kvpilot/serviceaccounts/kvpilot-operator/token"),
    ("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/kvpilot/rolebindings"),
    ("DELETE", "/apis/coordination.k8s.io/v1/namespaces/kvpilot/leases/any"),
    ("GET", "/api/v1/nodes"),
]


@pytest.mark.parametrize("account", ["kvpilot-operator", "kvpilot-engine"])
def test_what_is_dangerous_is_refused_when_it_is_tried(cluster, account):
    from kubernetes.client.exceptions import ApiException

    name = cluster.new_name()
    (pod,) = cluster.deploy(name, 1)
    cluster.create_policy(name)
    api = cluster.server.api(impersonate=ACCOUNT.format(account))
    for method, path in DANGEROUS:
        actual = path.format(pod=pod["metadata"]["name"], name=name)
        body = {} if method in ("POST", "PATCH") else None
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with pytest.raises(ApiException) as refused:
            cluster.server.call(method, actual, body, api=api, content_type=kind)
        assert refused.value.status == 403, (method, actual)


def test_no_role_has_a_wildcard_or_names_what_is_forbidden(cluster):
    roles = [each for each in cluster.resources if each["kind"] in ("Role", "ClusterRole")]
    assert {role["kind"] for role in roles} == {"Role"}
    for role in roles:
        for rule in role["rules"]:
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not words & {
                "*",
                "secrets",
                "pods/exec",
                "deployments/scale",
                "statefulsets/scale",
                "escalate",
            }
