"""The engine itself on a virtual clock: a latency profile stands in for the model."""

from kvpilot.engine.engine import Engine
from kvpilot.env.simulator.core import SimulatedCore


class SimulatedEngine(SimulatedCore, Engine):
    """`SimulatedCore` as an ordinary Python class."""
