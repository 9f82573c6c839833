"""Vidur (MLSys 2024) on a file of arrivals and lengths; run by the Python of an environment that has it.

Its profiling data are not part of its package: step times are those of the same roofline that our simulator gets,
in the place of its regression tables, which would only add to its cost. Its own plots and traces are switched off.

    vidur_worker.py TRACE.csv PROFILE.json  ->  one line of JSON
"""

# pyright: reportMissingImports=false
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version

import pandas as pd

PROFILE = json.load(open(sys.argv[2], encoding="utf-8"))  # noqa: SIM115
TRACE = os.path.abspath(sys.argv[1])
os.chdir(tempfile.mkdtemp())  # it writes beside itself

from vidur._native.entities import ExecutionTime  # noqa: E402
from vidur.config import (  # noqa: E402
    CacheConfig,
    ClusterConfig,
    LinearRegressionExecutionTimePredictorConfig,
    MetricsConfig,
    ReplicaConfig,
    SarathiSchedulerConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
)
from vidur.execution_time_predictor import (  # noqa: E402
    ExecutionTimePredictorRegistry,
    execution_time_predictor_registry,
)
from vidur.execution_time_predictor.base_execution_time_predictor import (  # noqa: E402
    BaseExecutionTimePredictor,
)
from vidur.simulator import Simulator  # noqa: E402

LAYERS = PROFILE["model"]["num_layers"]
KNEE, ROW_SECONDS = PROFILE["rows"][0]


class Roofline(BaseExecutionTimePredictor):
    """Milliseconds per layer, as Vidur wants them."""

    def get_execution_time(self, batch, pipeline_stage):
        tokens = sum(batch.num_q_tokens)
        seconds = PROFILE["fixed"] + ROW_SECONDS * max(tokens - KNEE, 0)
        return ExecutionTime(LAYERS, 0, 0, 0, 0, 1000 * seconds / LAYERS, *[0] * 9)


Roofline.__abstractmethods__ = frozenset()


def main() -> None:
    rows = pd.read_csv(TRACE)
    max_tokens = int((rows.PromptTokenCount + rows.CompletionTokenCount).max())
    registry = ExecutionTimePredictorRegistry
    kind = execution_time_predictor_registry.ExecutionTimePredictorType.LINEAR_REGRESSION
    registry.unregister(kind)
    registry.register(kind, Roofline)
    config = SimulationConfig(
        log_level="error",
        cluster_config=ClusterConfig(
            replica_config=ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=CacheConfig(
                block_size=512, num_blocks=PROFILE["engine"]["pool_bytes"] // (512 << 17)
            ),
            replica_scheduler_config=SarathiSchedulerConfig(
                batch_size_cap=PROFILE["engine"]["max_batch"], chunk_size=PROFILE["engine"]["prefill_chunk"]
            ),
        ),
        request_generator_config=TraceRequestGeneratorConfig(
            trace_file=TRACE, date="d", prefill_scale_factor=1, time_scale_factor=1, max_tokens=max_tokens
        ),
        execution_time_predictor_config=LinearRegressionExecutionTimePredictorConfig(
            use_native_execution_time_predictor=False
        ),
        metrics_config=MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, store_utilization_metrics=False
        ),
    )
    simulator = Simulator(config)
    begin = time.process_time()
    simulator.run()
    seconds = time.process_time() - begin
    print(json.dumps({"version": version("vidur"), "requests": len(rows), "cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
