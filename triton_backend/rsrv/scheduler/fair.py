"""Weighted fair shares of device time: earliest eligible virtual deadline first (EEVDF).

Source: Stoica and Abdel-Wahab, "Earliest Eligible Virtual Deadline First", 1995. Linux schedules processes by it.

Every model i with work and weight w_i has a virtual start v_i. The start rises by s / w_i for each s seconds of device time
that the model takes. An execution takes the device until its end is handled and another one can begin. The virtual clock V is
the weighted mean of the starts of all models with work:

    V = sum(w_i * v_i) / sum(w_i)         so that sum(w_i * (V - v_i)) = 0

The lag w_i * (V - v_i) is the device time that model i is owed. If it is negative, the model owes device time. A model is
*eligible* while it owes nothing: v_i <= V. At least one model is always eligible. A model's virtual deadline is v_i + c_i /
w_i, where c_i is the expected cost of a full execution of it. The eligible model with the earliest virtual deadline executes
next. A model's start rises when its execution starts. The clock rises while the execution runs. (If c_i were the cost of the
requests that wait just now, small batches would precede large batches, and all batches would be small.)

Three properties follow, and the tests check them. Here c is the cost of the model's largest execution, C that of any
model's largest execution, and s = w_i / sum(w) over the models with work:

- A model that begins to wait and owes nothing executes after at most c / s + C, and again after at most
  2 c / s + C. So cheap models wait briefly even if others are expensive, and no model is locked out.
- While two models have work, compare their device times, each divided by the model's weight. Over any interval, they
  differ by at most the sum of both models' (c + C) / w_i. (Start-time fair queueing keeps the difference within the sum of
  c / w_i, but there a newcomer waits for an execution of every model.) Nothing is averaged, so there is nothing to tune.
- A model's cost decides when the model executes, never how much device time it gets: cheap or expensive, a model above
  its share is not eligible.

A model that runs out of work while it owes device time stays in the mean until V has passed its start. Otherwise, it
could drop the debt by pausing. A model that runs out of work while it is owed device time loses the claim: idle models
save no credit. When no model has work, all debts end, because no model waits for them.

A model with work whose weights are absent is not in the mean, but keeps its lag until the weights are loaded. So models whose
weights take turns on the device also share the device time by weight. A model without its weights cannot claim the rise of the
clock during loads that evicted nothing: there was room for the weights of all models, and after a long load the claim would keep
the other models from executing.

A model that an operator holds gets back, after the hold, the lag that it had when the hold began. It cannot claim the device
time that other models got during the hold. Otherwise, it would keep them from executing after the hold, for as long as the hold
was. If a held model owes device time, its debt falls as the clock rises, as with any model without work.

Among eligible models, the model with the highest priority executes first. A model with a high priority cannot take more than
its share in this way, because it is then not eligible. So a model with a low priority waits at most until all other models are
above their shares. Only committed requests of meta models execute while their model is not eligible. The model is charged for
them as for all other requests.
"""

from rsrv.scheduler.discipline import COMMITTED_LEVEL, Candidate, Place
from rsrv.scheduler.ranking import Rank, Ranking


class Account:
    """Device time of one model, in virtual time."""

    __slots__ = (
        "claims",
        "executing",
        "fill_rise_at_wait",
        "held_lag",
        "present",
        "start",
        "waits_from",
        "weight",
    )

    def __init__(self, start: float, weight: float) -> None:
        self.start = start
        self.weight = weight
        #: True if the mean includes the model: it has work, or executes, or owes device time.
        self.present = False
        #: Number of executions in flight.
        self.executing = 0
        #: Start of the model when it began to wait. None: it is not waiting.
        self.waits_from: float | None = None
        #: True if the model waits for its weights: it may then claim the device time that it loses.
        self.claims = False
        #: Value of `Fair._fill_rise` when the model began to wait. The model may not claim the clock's rise during
        #: loads into free room.
        self.fill_rise_at_wait = 0.0
        #: Difference between the clock and the model's start when the hold began, or 0 if the start was later.
        self.held_lag = 0.0


class Fair:
    """Each model with work gets device time in proportion to its weight."""

    __slots__ = (
        "_accounts",
        "_clock",
        "_due",
        "_eligible",
        "_executing",
        "_fill_from",
        "_fill_rise",
        "_idle_debtors",
        "_ineligible",
        "_later_ranks",
        "_now",
        "_waiting",
        "_weight",
    )

    sheds = False

    def __init__(self) -> None:
        self._clock = 0.0
        #: Sum of the weights of all present models.
        self._weight = 0.0
        self._now = 0.0
        #: Rise of the clock during loads into free room.
        self._fill_rise = 0.0
        #: Value of the clock when the current load into free room began. None: no such load runs.
        self._fill_from: float | None = None
        #: Device time that is charged but has not passed yet, so the clock does not include it.
        self._due = 0.0
        #: Model and expected seconds of each execution in flight, by number.
        self._executing: dict[int, tuple[str, float]] = {}
        self._accounts: dict[str, Account] = {}
        #: Eligible candidates, by (level, virtual deadline, place). The level is the first element of the place.
        self._eligible: Ranking[str] = Ranking()
        #: Candidates that owe device time, by virtual start.
        self._ineligible: Ranking[str] = Ranking()
        #: Ranks that the ineligible candidates get once they are eligible. Some of these ranks are outdated.
        self._later_ranks: dict[str, Rank] = {}
        #: Models without work that owe device time, by virtual start.
        self._idle_debtors: Ranking[str] = Ranking()
        #: Models with work that cannot execute now, the latest virtual start first.
        self._waiting: Ranking[str] = Ranking()

    def place(self, level: int, deadline: float | None, sequence: int) -> Place:
        return (level, 0.0, sequence)

    # --- changes -------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        passed = min(now - self._now, self._due)
        self._now = now
        if passed > 0.0:
            self._due -= passed
            self._advance_clock(passed)
            self._settle()

    def update(self, candidate: "Candidate") -> None:
        name, place = candidate.name, candidate.place
        account = self._account(candidate)
        enters = not account.present
        if enters:
            self._enter(account, self._entry(account))
        else:
            self._idle_debtors.pop(name, None)
        account.waits_from, account.held_lag = None, 0.0
        self._waiting.pop(name, None)
        assert place is not None
        rank = (place[0], account.start + candidate.batch_seconds / candidate.weight, place)
        if account.start <= self._clock or rank[0] == COMMITTED_LEVEL:
            self._ineligible.pop(name, None)
            self._eligible.set(name, rank)
        else:
            self._eligible.pop(name, None)
            self._ineligible.set(name, account.start)
            self._later_ranks[name] = rank
        if enters:
            # The model's entry has moved the clock, so other models may be eligible now.
            self._settle()

    def wait(self, candidate: "Candidate", *, claims: bool) -> None:
        name = candidate.name
        account = self._account(candidate)
        account.claims = claims
        if account.waits_from is None:
            account.fill_rise_at_wait = self._rise_while_filling()
            self._idle_debtors.pop(name, None)
            if account.present:
                account.waits_from = account.start
                self._leave(account)
            else:
                account.waits_from = self._entry(account)
            account.held_lag = 0.0
            self._waiting.set(name, -account.waits_from)
        self._eligible.pop(name, None)
        self._ineligible.pop(name, None)
        self._settle()

    def hold(self, name: str) -> None:
        account = self._accounts.get(name)
        if account is None:
            return
        lag = account.held_lag
        if account.waits_from is not None:
            lag = self._clock - self._entry(account)
        elif name in self._eligible or name in self._ineligible:
            lag = self._clock - account.start
        self.end_work(name)
        account.held_lag = max(0.0, lag)

    def end_work(self, name: str) -> None:
        account = self._accounts.get(name)
        if account is None:
            return
        account.waits_from, account.held_lag = None, 0.0
        self._waiting.pop(name, None)
        self._eligible.pop(name, None)
        self._ineligible.pop(name, None)
        self._leave_when_paid(name, account)
        self._settle()

    def remove(self, name: str) -> None:
        account = self._accounts.pop(name, None)
        if account is not None:
            for number in [own for own, (whose, _) in self._executing.items() if whose == name]:
                del self._executing[number]
            for ranking in (self._idle_debtors, self._waiting, self._eligible, self._ineligible):
                ranking.pop(name, None)
            self._later_ranks.pop(name, None)
            if account.present:
                self._leave(account)
            self._settle()

    def start(self, number: int, name: str, expected: float) -> None:
        account = self._accounts[name]
        account.executing += 1
        account.start += expected / account.weight
        self._due += expected
        self._executing[number] = name, expected

    def end(self, number: int, seconds: float) -> None:
        started = self._executing.pop(number, None)
        if started is None:
            return  # The execution started under another discipline, or its model was removed.
        name, expected = started
        self._due += seconds - expected
        ahead = (
            sum([others_ahead for _, others_ahead in self._executing.values()]) if self._executing else 0.0
        )
        if self._due > ahead:
            # The execution took longer than expected.
            self._advance_clock(self._due - ahead)
            self._due = ahead
        account = self._accounts[name]
        account.executing -= 1
        correction = (seconds - expected) / account.weight
        account.start += correction
        if account.waits_from is not None:
            account.waits_from += correction
            self._waiting.set(name, -account.waits_from)
        self._settle()

    def set_filling(self, filling: bool) -> None:
        if not filling:
            self._fill_rise, self._fill_from = self._rise_while_filling(), None
        elif self._fill_from is None:
            self._fill_from = self._clock

    # --- decisions, which change no state ------------------------------------------------------------------

    def rank(self, candidate: "Candidate") -> Rank:
        """Return the rank of a model in the order of loads: (committed or not, virtual start, place).

        Loads are not ordered by virtual deadline: while models wait for the link, the clock hardly moves, and cheap newcomers
        would pass an expensive model forever. They are not ordered by priority either: models that owe device time would keep
        their weights, and models that are owed device time would wait forever.
        """
        account, place = self._accounts[candidate.name], candidate.place
        assert place is not None
        start = account.start if account.waits_from is None else account.waits_from
        return (min(place[0], COMMITTED_LEVEL + 1), start, place)

    def choose(self) -> str | None:
        if self._eligible:
            return self._eligible.first()
        # If no model is eligible, the clock lags behind the executions in flight, or was rounded. Then the model with
        # the least debt executes.
        return self._ineligible.first() if self._ineligible else None

    # --- the virtual clock ---------------------------------------------------------------------------------

    def _account(self, candidate: "Candidate") -> Account:
        account = self._accounts.get(candidate.name)
        if account is None:
            account = self._accounts[candidate.name] = Account(self._clock, candidate.weight)
        elif account.weight != candidate.weight:
            if account.present:
                # The model keeps its lag in device time. The clock and all other models do not change.
                lag = (self._clock - account.start) * account.weight / candidate.weight
                account.start = self._clock - lag
                self._weight += candidate.weight - account.weight
            account.weight = candidate.weight
        return account

    def _rise_while_filling(self) -> float:
        """Return how far the clock has risen during loads into free room."""
        return self._fill_rise + (0.0 if self._fill_from is None else max(0.0, self._clock - self._fill_from))

    def _entry(self, account: Account) -> float:
        """Return the virtual start of a model that enters the mean."""
        if account.waits_from is None:
            return max(account.start, self._clock - account.held_lag)
        if not account.claims:
            return max(account.waits_from, self._clock)
        return max(
            account.waits_from,
            min(self._clock, account.waits_from + self._rise_while_filling() - account.fill_rise_at_wait),
        )

    def _enter(self, account: Account, start: float) -> None:
        """Include a model in the mean."""
        account.start = start
        account.present = True
        self._weight += account.weight
        self._clock += (start - self._clock) * account.weight / self._weight

    def _leave(self, account: Account) -> None:
        """Remove a model from the mean. The other models share its lag."""
        account.present = False
        self._weight -= account.weight
        if self._weight > 1e-9 * account.weight:
            self._clock += (self._clock - account.start) * account.weight / self._weight
        else:
            self._weight = 0.0

    def _leave_when_paid(self, name: str, account: Account) -> None:
        """Remove a model without work from the mean, once it neither executes nor owes device time."""
        if account.executing:
            return
        if account.start > self._clock:
            if not account.present:
                self._enter(account, account.start)
            self._idle_debtors.set(name, account.start)
        elif account.present:
            self._idle_debtors.pop(name, None)
            self._leave(account)

    def _advance_clock(self, seconds: float) -> None:
        """Let device time pass: the clock rises, and the debts that it passes are paid."""
        while seconds > 0.0 and self._weight > 0.0:
            name = self._idle_debtors.first() if self._idle_debtors else None
            if name is not None:
                account = self._accounts[name]
                step = (account.start - self._clock) * self._weight
                if step <= seconds:
                    seconds -= max(0.0, step)
                    self._clock = max(self._clock, account.start)
                    self._idle_debtors.pop(name, None)
                    self._leave(account)
                    continue
            self._clock += seconds / self._weight
            return

    def _settle(self) -> None:
        """Make the models eligible whose start the clock has reached. If nothing executes or can execute, end all debts.

        To end the debts, the clock moves to the latest start. The next model enters at this value.
        """
        while self._ineligible and (name := self._ineligible.first()) is not None:
            if self._ineligible[name] > self._clock:
                return
            del self._ineligible[name]
            self._eligible.set(name, self._later_ranks[name])
        if not self._eligible and not self._executing:
            latest = self._waiting.first() if self._waiting else None
            if latest is not None:
                self._clock = max(self._clock, -self._waiting[latest])
            if self._idle_debtors:
                for name in self._idle_debtors:
                    account = self._accounts[name]
                    account.present = False
                    self._clock = max(self._clock, account.start)
                self._idle_debtors.clear()
            self._weight = self._due = 0.0
