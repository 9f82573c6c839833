"""The engine: requests in, tokens out, one step at a time, with knobs that may change between steps."""

from kvpilot.engine.core import EngineCore


class Engine(EngineCore):
    """`EngineCore` as an ordinary Python class: its methods may be overridden, on a class or on an object."""
