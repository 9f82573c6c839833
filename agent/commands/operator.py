"""`autotune operator`: KVPolicies of one namespace become control documents for its pods."""

from typing import Annotated

import typer
from typer import Option


def register(app: typer.Typer) -> None:
    app.command("operator")(operator)


def operator(
    namespace: Annotated[
        str, Option(envvar="POD_NAMESPACE", help="Where the KVPolicies and their targets are.")
    ],
    resync: Annotated[float, Option(help="Seconds between two rounds if no change wakes it.")] = 5.0,
    lease_seconds: Annotated[
        int, Option(help="After so long without a sign of life another operator takes over.")
    ] = 15,
    health_port: Annotated[
        int | None, Option(min=0, max=65535, help="Serve /healthz there; 0 takes a free one. [default: none]")
    ] = None,
    health_host: Annotated[
        str, Option(help="Its address. By default all of them: a kubelet asks at the pod's.")
    ] = "0.0.0.0",
) -> None:
    """Run the Kubernetes operator: canaries, holds during rollouts, one control document per target.

    Reaches the cluster as the pod's service account, or by KUBECONFIG. Several may run: one acts per target.

        autotune operator --namespace inference
    """
    from kvpilot.agent.operator_run import run_operator
    from kvpilot.k8s.operate import OperatorConfig

    config = OperatorConfig(namespace=namespace, resync_seconds=resync, lease_seconds=lease_seconds)
    raise typer.Exit(run_operator(config, health_host, health_port))
