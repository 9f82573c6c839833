"""Eviction orders: LRU exactly, hazard by what it has seen return."""

import random

import pytest

from kvpilot.engine.kv.eviction import POLICIES, EvictionPolicy, HazardPolicy, LruPolicy
from kvpilot.engine.kv.idle_queue import IdleQueue
from kvpilot.engine.kv.page import Page


def make_page(rank: int, last_use: float = 0.0, turn: int = 1, num_prompt_tokens: int = 100) -> Page:
    page = Page(rank, rank)
    page.idle_rank, page.last_use, page.turn, page.num_prompt_tokens = rank, last_use, turn, num_prompt_tokens
    page.hash = rank
    return page


class EvictionConformance:
    """What every policy must do; subclasses name one."""

    policy_name: str

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return POLICIES[self.policy_name]()

    @pytest.fixture
    def queue(self, policy) -> IdleQueue:
        return IdleQueue(policy)

    def test_every_page_added_comes_out_once(self, queue):
        pages = [
            make_page(rank, rank / 10, turn=1 + rank % 7, num_prompt_tokens=rank * 400) for rank in range(200)
        ]
        random.Random(0).shuffle(pages)
        for page in pages:
            queue.add(page)
        for page in pages[:50]:
            queue.remove(page)
        seen = []
        while (page := queue.first(now=50.0)) is not None:
            queue.remove(page)
            seen.append(page)
        assert sorted(p.idle_rank for p in seen) == sorted(p.idle_rank for p in pages[50:])
        assert queue.last(now=50.0) is None

    def test_first_and_last_agree_on_a_single_page(self, queue):
        page = make_page(1)
        queue.add(page)
        assert queue.first(1.0) is queue.last(1.0) is page

    def test_first_and_last_are_those_that_a_look_at_every_page_finds(self, policy, queue):
        """By value, of equal ones by rank; of a policy that has learned nothing yet. Pages come back, too."""
        rng, now, pages, gone = random.Random(2), 0.0, [], []

        def key(page: Page) -> tuple[float, int]:
            return policy.value(page, now), page.idle_rank

        for rank in range(300):
            now += rng.random()
            page = gone.pop() if len(gone) > 20 else Page(rank, rank)
            page.idle_rank, page.last_use, page.hash = rank, now, rank
            page.turn, page.num_prompt_tokens = rng.randint(1, 9), rng.choice((30, 900, 5000, 50_000))
            queue.add(page)
            pages.append(page)
            if rank % 3 == 0:
                gone.append(pages.pop(rng.randrange(len(pages))))
                queue.remove(gone[-1])
            if pages:
                assert queue.first(now) is min(pages, key=key)
                assert queue.last(now) is max(pages, key=key)

    def test_a_leaf_goes_before_its_parent(self, queue):
        leaf, parent = make_page(1, 5.0), make_page(2, 5.0)
        for page in (parent, leaf):
            queue.add(page)
        assert queue.first(6.0) is leaf
        assert queue.last(6.0) is parent


class TestLru(EvictionConformance):
    policy_name = "lru"

    def test_the_longest_idle_goes_first(self):
        queue = IdleQueue(LruPolicy())
        ranks = list(range(100))
        random.Random(1).shuffle(ranks)
        for rank in ranks:
            queue.add(make_page(rank, last_use=float(rank)))
        order = []
        while page := queue.first(200.0):
            order.append(page.idle_rank)
            queue.remove(page)
        assert order == list(range(100))

    def test_a_page_that_comes_back_has_its_new_place(self, queue):
        old, young = make_page(1), make_page(2)
        queue.add(old)
        queue.add(young)
        queue.remove(old)
        old.idle_rank, old.last_use = 3, 5.0
        queue.add(old)
        assert queue.first(6.0) is young
        assert queue.last(6.0) is old


class TestHazard(EvictionConformance):
    policy_name = "hazard"

    def test_a_class_that_returns_outlives_a_younger_one_that_does_not(self):
        policy = HazardPolicy()
        now = 0.0
        for i in range(200):  # turn 3 returns after 20 s, turn 1 never
            returning, leaving = make_page(2 * i, now, turn=3), make_page(2 * i + 1, now, turn=1)
            policy.request_ended(returning, now)
            policy.request_ended(leaving, now)
            now += 20
            policy.request_arrived(lambda _, block=returning.hash: block, 1, now)
        queue = IdleQueue(policy)
        returning = make_page(1000, now, turn=3)
        leaving = make_page(1001, now + 5, turn=1)
        queue.add(returning)
        queue.add(leaving)
        assert queue.first(now + 6) is leaving
        assert policy.return_probability(policy.bucket(returning), 5.0) > 0.9
        assert policy.return_probability(policy.bucket(leaving), 5.0) < 0.1

    def test_of_a_class_that_returns_late_the_youngest_goes_first_and_leaf_before_parent(self):
        policy = HazardPolicy(horizon_seconds=20.0)
        now = 0.0
        for i in range(100):  # every spell ends after 100 s
            page = make_page(i, now)
            policy.request_ended(page, now)
            now += 100
            policy.request_arrived(lambda _, block=page.hash: block, 1, now)
        queue = IdleQueue(policy)
        old = make_page(1000, now - 80)
        young_leaf, young_parent = make_page(1001, now), make_page(1002, now)
        for page in (old, young_leaf, young_parent):
            queue.add(page)
        assert queue.first(now) is young_leaf, "it would have to be kept five times as long for the same hit"
        queue.remove(young_leaf)
        assert queue.first(now) is young_parent
        queue.remove(young_parent)
        assert queue.first(now) is old

    def test_without_experience_it_is_lru(self):
        queue = IdleQueue(HazardPolicy())
        pages = [make_page(rank, float(rank), turn=1 + rank % 5) for rank in range(20)]
        for page in pages:
            queue.add(page)
        assert queue.first(30.0) is pages[0]
        assert queue.last(30.0) is pages[-1]

    def test_probabilities_are_finite_at_any_age(self):
        policy = HazardPolicy()
        page = make_page(1)
        policy.request_ended(page, 0.0)
        policy.request_arrived(lambda _: 1, 1, 1e5)
        for age in (0.0, 1e-9, 59.0, 3600.0, 7200.0, 1e6):
            assert 0 <= policy.return_probability(policy.bucket(page), age) < 10
