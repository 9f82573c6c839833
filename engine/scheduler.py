"""Continuous batching: who is admitted, who runs in this step, who gives way. No torch, no clock of its own."""

from bisect import insort
from math import ceil, inf

from kvpilot.engine.compiled import mypyc_attr
from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.errors import PoolIntegrityError
from kvpilot.engine.kv.cache import KVCache, Take
from kvpilot.engine.kv.page import Page, PageState
from kvpilot.engine.request import FinishReason, Request, SampledToken, ScheduledRequest, StepOutput
from kvpilot.engine.stats import StatsRecorder

FORCED_EVERY = 8  # at most one admission in so many takes retained pages for a starving request
MAX_CANDIDATES = 32  # waiting requests tried per step, in order of preference


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Owns the running and the waiting requests. `schedule` chooses a step, `commit` books its results.

    Progress: the oldest running request is never preempted, a starving request goes first, and with nothing
    running any request fits alone (the engine checks `max_model_len` against the pool).
    """

    def __init__(
        self, config: EngineConfig, cache: KVCache, stats: StatsRecorder, *, max_model_len: int
    ) -> None:
        self.cache = cache
        self.knobs = config.knobs
        self.running: list[Request] = []  # in order of admission
        self.waiting: list[Request] = []  # in order of arrival
        self.max_model_len = max_model_len
        self._page_size = config.page_size
        self._prefill_chunk = config.prefill_chunk
        self._starvation_seconds = config.starvation_seconds
        self.reserve_slots = ceil(config.reserve_fraction * cache.pool.num_slots)
        self._stats = stats
        self.num_since_forced = FORCED_EVERY
        self._has_tried_to_admit = True  # in this step; not if somebody was preempted

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.arrival_time)
        self._stats.add("requests_received")

    def set_knobs(self, knobs: Knobs, now: float) -> None:
        self.knobs = knobs
        self.cache.set_knobs(knobs, now)

    # ------------------------------------------------------------------ schedule
    def schedule(self, now: float) -> list[ScheduledRequest]:
        """The requests and token ranges of the next step; empty if nothing can run."""
        self.cache.idle.tick(now)
        self._has_tried_to_admit = self._grow(now)
        if self._has_tried_to_admit:
            self._admit(now)
        return self._next_batch()

    def _next_batch(self) -> list[ScheduledRequest]:
        batch: list[ScheduledRequest] = []
        budget = self._prefill_chunk
        for request in self.running:
            num_new = request.num_tokens - request.num_computed
            if num_new > 1:
                num_new = min(num_new, budget)
                budget -= num_new
            if num_new > 0:
                samples = request.num_computed + num_new == request.num_tokens
                entry = (request, request.num_computed, num_new, samples)
                batch.append(tuple.__new__(ScheduledRequest, entry))  # cheaper than its own constructor
        return batch

    def _grow(self, now: float) -> bool:
        """Give every running request the page its next token needs; False if somebody was preempted for it."""
        undisturbed = True
        for request in list(self.running):
            while request.pages and request.num_tokens > len(request.pages) * self._page_size:
                if self.cache.reclaim(1, now, Take.GROWTH):
                    new_pages = self.cache.allocate(1)
                    request.pages += new_pages
                    if request.max_kv_level is not None:
                        self.cache.limit(new_pages, request.max_kv_level)
                    self.cache.pool.add_readers(new_pages, 1)
                    continue
                victim = self.running[-1]
                self._preempt(victim, now)  # takes its pages, which ends the loop if it is the request itself
                undisturbed = False
        return undisturbed

    def _preempt(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._release_pages(request, now)
        request.num_computed = 0
        request.num_preemptions += 1
        insort(self.waiting, request, key=lambda r: r.arrival_time)
        self._stats.add("preemptions")

    # ------------------------------------------------------------------ admission
    def _admit(self, now: float) -> None:
        """Fill free seats: a starving request before all others, then by cached share of the prompt."""
        while self._has_seat() and self._is_starving(self.waiting[0], now):
            oldest = self.waiting[0]
            if self._try_admit(oldest, now, None):
                continue
            if self.running and self.num_since_forced < FORCED_EVERY - 1:
                break  # others may go ahead until it is its turn
            if not self._try_admit(oldest, now, Take.STARVING):
                return  # memory is in use by running requests: let it drain to this one
        if not self._has_seat():
            return
        for request in self._by_preference()[:MAX_CANDIDATES]:
            self._try_admit(request, now, None)
            if not self._has_seat():
                return
        if not self.running:
            admitted = self._try_admit(self._by_preference()[0], now, Take.IDLE_ENGINE)
            assert admitted, "a request does not fit into an idle engine"

    def _has_seat(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.knobs.max_batch

    def _is_starving(self, request: Request, now: float) -> bool:
        return now - request.arrival_time > self._starvation_seconds

    def _by_preference(self) -> list[Request]:
        """The waiting requests, the largest cached share of the prompt first, then by arrival."""
        shares = [self._cached_share(request) for request in self.waiting]
        if not any(shares):
            return list(self.waiting)
        order = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
        return [self.waiting[i] for i in order]

    def _cached_share(self, request: Request) -> float:
        max_pages = self._max_cached_pages(request)
        known = request.num_known_pages
        max_level = request.max_kv_level
        while known < max_pages and self.cache.has(request.block_hash(known), max_level):
            known += 1
        while known > 0 and not self.cache.has(request.block_hash(known - 1), max_level):
            known -= 1
        request.num_known_pages = known
        return known * self._page_size / request.num_tokens

    def _max_cached_pages(self, request: Request) -> int:
        """The last token is always computed: its logits are needed."""
        return (request.num_tokens - 1) // self._page_size

    def _try_admit(self, request: Request, now: float, take: Take | None) -> bool:
        max_level = request.max_kv_level
        pages = self.cache.match(request.block_hash, self._max_cached_pages(request), max_level)
        num_new = ceil(request.num_tokens / self._page_size) - len(pages)
        watermark = self.reserve_slots if self.running else 0
        if self.cache.obtainable_slots(pages, with_retained=take is not None) < num_new + watermark:
            return False
        self.cache.acquire(pages, now)
        if not self.cache.reclaim(num_new, now, take):  # a page could not be encoded
            self.cache.release(pages, len(pages), now)
            return False
        request.turn = 1 + pages[-1].turn if pages else 1
        request.num_computed = len(pages) * self._page_size
        request.num_sealed = len(pages)
        request.pages = pages + self.cache.allocate(num_new)
        if max_level is not None:
            self.cache.limit(request.pages, max_level)
        self.waiting.remove(request)
        self.running.append(request)
        self._note_decoding(request)
        self._book_admission(request, now, take)
        return True

    def _book_admission(self, request: Request, now: float, take: Take | None) -> None:
        self._stats.add("admissions")
        self.num_since_forced += 1
        if take == Take.STARVING:
            self._stats.add("admissions_forced")
            self.num_since_forced = 0
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            request.first_admission_time = now
            self._stats.add("prompt_tokens", request.num_prompt_tokens)
            self._stats.add("prefix_query_tokens", request.num_prompt_tokens)
            self._stats.add("prefix_hit_tokens", request.num_cached)
            self._stats.observe("queue_seconds", now - request.arrival_time)
            num_blocks = request.num_prompt_tokens // self._page_size
            self.cache.policy.request_arrived(request.block_hash, num_blocks, now)

    # ------------------------------------------------------------------ commit
    def commit(
        self, batch: list[ScheduledRequest], sampled: list[SampledToken | None], now: float, repeats: int = 1
    ) -> list[StepOutput]:
        """Book the tokens of a step: seal full pages, append what was drawn, end who is done.

        `repeats` > 1 books so many equal decode steps at once, as far as `quiet_steps` allows (the simulator).
        """
        outputs: list[StepOutput] = []
        assert len(sampled) == len(batch), "a runner answers once per scheduled request"
        for level, num_pages in enumerate(self.cache.pool.page_reads):
            if num_pages:
                self._stats.add("pages_read", num_pages * repeats, self.cache.pool.ladder[level])
        for index, (request, start, num_new, samples) in enumerate(batch):
            draw = sampled[index]
            request.num_computed = start + num_new + repeats - 1
            self._seal_full_pages(request)
            if num_new > 1:
                self._stats.add("prefill_tokens", num_new)
            if not samples:
                continue
            self._book_tokens(request, now, repeats)
            token = None if draw is None else draw.token
            if token is not None and request.tokens is not None:
                request.tokens.append(token)
            request.num_tokens += repeats
            self._note_decoding(request)
            reason = self._finish_reason(request, token)
            if reason is not None:
                self.finish(request, reason, now)
            output = (request, token, draw.logprobs if draw else None, reason)
            outputs.append(tuple.__new__(StepOutput, output))  # cheaper than its own constructor
        return outputs

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a running or waiting request and let go of its pages."""
        if request in self.running:
            self.running.remove(request)
            self._release_pages(request, now)
        else:
            self.waiting.remove(request)
        request.finish_reason, request.finish_time = reason, now
        self._stats.add("requests_finished", 1, reason.value)
        if request.is_answered:
            self._stats.observe("e2e_request_seconds", now - request.arrival_time)

    def _finish_reason(self, request: Request, token: int | None) -> FinishReason | None:
        if request.sampling is not None and token in request.sampling.stop_token_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _book_tokens(self, request: Request, now: float, num_tokens: int) -> None:
        self._stats.add("generation_tokens", num_tokens)
        if request.last_token_time is None:
            request.first_token_time = now
            self._stats.observe("time_to_first_token_seconds", now - request.arrival_time)
        else:
            gap = (now - request.last_token_time) / num_tokens
            self._stats.observe("inter_token_seconds", gap, num_tokens)
        request.last_token_time = now

    # ------------------------------------------------------------------ pages of a request
    def _seal_full_pages(self, request: Request) -> None:
        while request.num_sealed < request.num_computed // self._page_size:
            index = request.num_sealed
            self.cache.seal(request.pages, index, request.block_hash(index))
            request.num_sealed += 1

    def _note_decoding(self, request: Request) -> None:
        if not request.is_decoding and not request.is_prefilling:
            request.is_decoding = True
            self.cache.pool.add_readers(request.pages, 1)

    def _release_pages(self, request: Request, now: float) -> None:
        if request.is_decoding:
            request.is_decoding = False
            self.cache.pool.add_readers(request.pages, -1)
        if request.max_kv_level is not None:
            self.cache.unlimit(request.pages, request.max_kv_level)
        self.cache.release(
            request.pages,
            request.num_sealed,
            now,
            turn=request.turn,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        request.pages, request.num_sealed = [], 0

    # ------------------------------------------------------------------ many steps at once
    def quiet_steps(self, batch: list[ScheduledRequest], now: float) -> int:
        """How many equal steps, this one included, decide nothing but time: the same requests decode, none ends,
        none needs or fills a page. What the clock alone can change is said by `next_deadline`."""
        if not self._has_tried_to_admit:
            return 1
        page_size = self._page_size
        quiet = 1 << 30
        for request, start, num_new, samples in batch:
            if num_new > 1 or not samples or request.last_token_time != now:
                return 1
            quiet = min(quiet, request.max_tokens - request.num_output_tokens)
            quiet = min(quiet, self.max_model_len - request.num_tokens)
            quiet = min(quiet, page_size - start % page_size)
        return quiet

    def next_deadline(self) -> float:
        """The first moment after which a step would decide otherwise though nothing happened: a retained page
        expires, or the oldest waiting request starves. A step that starts at that very moment does not."""
        starving = self.waiting[0].arrival_time + self._starvation_seconds if self.waiting else inf
        return min(starving, self.cache.idle.next_expiry())

    # ------------------------------------------------------------------ checks
    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless the running requests use exactly the live pages."""
        users: dict[Page, int] = {}
        guards: dict[Page, int] = {}
        for request in self.running:
            for page in request.pages:
                users[page] = users.get(page, 0) + 1
            for page in self.cache.tail(request.pages, request.num_sealed):
                guards[page] = guards.get(page, 0) + 1
            sealed = sum(page.is_sealed for page in request.pages)
            if sealed != request.num_sealed or len(request.pages) * self._page_size < request.num_computed:
                raise PoolIntegrityError(
                    f"request {request.request_id}: {len(request.pages)} pages, {sealed} sealed, "
                    f"booked {request.num_sealed}, {request.num_computed} tokens computed"
                )
        live = self.cache.pool.num_pages(PageState.LIVE)
        wrong = [p.page_id for p in users if p.refs != users[p] or p.guards != guards.get(p, 0)]
        if live != len(users) or wrong:
            raise PoolIntegrityError(f"live pages: booked {live}, in use {len(users)}, wrong users {wrong}")
        if any(request.pages for request in self.waiting):
            raise PoolIntegrityError("a waiting request holds pages")
        self._check_limits()

    def _check_limits(self) -> None:
        """What pages know of their users' `max_kv_level`, and that none is coarser."""
        limits: dict[Page, list[int]] = {}
        for request in self.running:
            for page in request.pages:
                of_page = limits.setdefault(page, [])
                if request.max_kv_level is not None:
                    of_page.append(request.max_kv_level)
        for page, wanted in limits.items():
            booked = sorted(page.limits or [])
            if booked != sorted(wanted) or page.level > min(booked, default=page.level):
                raise PoolIntegrityError(
                    f"page {page.page_id} at level {page.level}: limits booked {booked}, of its users {wanted}"
                )
