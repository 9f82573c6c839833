"""Leader election under every interleaving that hypothesis finds: never two, and always one again."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.k8s.errors import ClusterError, StaleWriteError
from kvpilot.k8s.lease import LeaseElector, LeaseRecord

DURATION = 15


class World:
    """A clock, and a Lease that takes time to reach. The server writes somewhere within a request."""

    def __init__(self) -> None:
        self.now = 0.0
        self.record: LeaseRecord | None = None
        self.delay = (0.0, 0.0)  # of a request, before and after the server acts
        self.lose = ""  # "request": never arrives; "answer": is done, but the client does not learn it
        self._version = 0

    def clock(self) -> float:
        return self.now

    def _reach_server(self) -> None:
        self.now += self.delay[0]
        if self.lose == "request":
            raise ClusterError("the request was lost")

    def _return(self) -> None:
        self.now += self.delay[1]
        if self.lose == "answer":
            raise ClusterError("the answer was lost")

    def read_lease(self, name: str) -> LeaseRecord | None:
        self._reach_server()
        record = self.record
        self._return()
        return record

    def write_lease(self, name: str, record: LeaseRecord) -> LeaseRecord:
        self._reach_server()
        if record.resource_version != (self.record.resource_version if self.record else ""):
            raise StaleWriteError("conflict")
        self._version += 1
        self.record = LeaseRecord(
            holder=record.holder,
            duration_seconds=record.duration_seconds,
            transitions=record.transitions,
            resource_version=str(self._version),
        )
        written = self.record
        self._return()
        return written


def elector(world: World, identity: str) -> LeaseElector:
    return LeaseElector(world, "target", identity, duration_seconds=DURATION, clock=world.clock)


def leaders(electors: list[LeaseElector]) -> list[str]:
    return [each.identity for each in electors if each.is_leader]


def live(world: World, electors: dict[str, LeaseElector], rng: random.Random, steps: int) -> None:
    """Candidates campaign, sleep, end and restart, requests are slow or lost: at no time are there two leaders."""
    for number in range(steps):
        world.now += rng.choice((0.1, 1, 3, 3, 8))
        name = rng.choice("abbccc")  # some sleep longer than others
        world.delay = (rng.choice((0, 0, 0, 1, 6)), rng.choice((0, 0, 0, 1, 6)))
        world.lose = rng.choice(("", "", "", "", "", "", "request", "answer"))
        action = rng.random()
        if action < 0.9:
            electors[name].campaign()
        elif action < 0.95:
            electors[name].give_back()
        else:  # a new process knows nothing and has another identity
            electors[name] = elector(world, f"{name}{number}")
        for _ in range(30):  # moments until the next step
            world.now += 0.1
            assert len(leaders(list(electors.values()))) <= 1


seeds = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_never_two_whatever_happens_and_always_one_again(seed):
    world, rng = World(), random.Random(seed)
    electors = {name: elector(world, name) for name in "abc"}
    live(world, electors, rng, 60)
    world.delay, world.lose = (0.0, 0.0), ""
    for _ in range(2 * DURATION):
        world.now += 1
        for each in electors.values():
            each.campaign()
    assert len(leaders(list(electors.values()))) == 1


def test_those_histories_have_many_changes_of_leaders():
    world, electors = World(), {}
    electors |= {name: elector(world, name) for name in "abc"}
    live(world, electors, random.Random(1), 400)
    assert world.record is not None
    assert world.record.transitions > 20


def test_a_dead_leader_is_replaced_after_the_duration_and_not_before():
    world = World()
    dead, heir = elector(world, "dead"), elector(world, "heir")
    assert dead.campaign()
    assert not heir.campaign()
    world.now = DURATION - 0.1
    assert not heir.campaign()
    assert not dead.is_leader  # it has stopped trusting itself long before
    world.now = DURATION + 0.1
    assert heir.campaign()
    assert world.record is not None
    assert world.record.transitions == 1
    assert not dead.campaign()


def test_a_lease_given_back_is_taken_at_once():
    world = World()
    first, second = elector(world, "first"), elector(world, "second")
    assert first.campaign()
    assert not second.campaign()
    first.give_back()
    assert not first.is_leader
    assert second.campaign()


def test_a_leader_cut_off_from_the_server_stops_by_itself():
    world = World()
    leader = elector(world, "leader")
    assert leader.campaign()
    world.lose = "request"
    world.now = DURATION * 2 / 3 - 0.1
    assert leader.campaign()
    world.now = DURATION * 2 / 3 + 0.1
    assert not leader.campaign()


def test_trust_counts_from_the_beginning_of_a_renewal_not_from_its_answer():
    world = World()
    leader = elector(world, "leader")
    world.delay = (0.0, 6.0)  # read and write together take longer than the trust that they bring
    assert not leader.campaign()
    assert world.record is not None
    assert world.record.holder == "leader"


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_lost_renewal_does_not_end_a_leadership_that_is_still_trusted(lost):
    world = World()
    leader = elector(world, "leader")
    leader.campaign()
    world.now, world.lose = 3.0, lost
    assert leader.campaign()
    world.now, world.lose = 6.0, ""
    assert leader.campaign()
