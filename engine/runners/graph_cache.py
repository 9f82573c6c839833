"""CUDA graphs of one computation in several shapes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from kvpilot.engine.collection import no_collection

MAX_GRAPHS = 256


class GraphCache:
    """Graphs by key, the least recently used dropped first. All share one memory pool: at most one runs at a time,
    and what it leaves must be in memory of the caller.

    A graph holds addresses. `version` stands for them: with another one, all graphs are dropped.
    """

    def __init__(self, max_graphs: int = MAX_GRAPHS) -> None:
        self.num_captured = 0
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._version: Hashable = None
        self._memory = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable, version: Hashable, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of this key; `compute` is captured if there is none, and must not wait for the GPU."""
        if version != self._version:
            self._graphs.clear()
            self._version = version
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(compute)
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _capture(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees while another one is captured spoils that one.
        with no_collection(), torch.cuda.graph(graph, pool=self._memory):
            compute()
        self.num_captured += 1
        return graph
