"""Who gets what of something scarce, and who gives way."""

from collections import Counter
from dataclasses import dataclass

import pytest

from rankwatch_service.access.budgets import Account, Budgets, Limit, Rate, Whose, account_at, account_of
from rankwatch_service.access.grants import GroupGrant, Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import JobFilter
from tests.support.clock import FakeClock

SEATS = Limit("seats", 16)
DAILY = Rate("bytes", 1_000, 86_400.0)
ANN, BOB = Account(Whose.PERSON, "ann"), Account(Whose.PERSON, "bob")
JOB, OTHER = Account(Whose.AGENT, "1"), Account(Whose.AGENT, "2")


@dataclass(eq=False)
class Seat:
    is_idle: bool = True


class Room:
    def __init__(self):
        self.clock = FakeClock()
        self.refused = Counter()
        self.budgets = Budgets(self.clock, lambda *reported: self.refused.update([reported]), [SEATS])

    def reserve(self, account, count=1, *, is_idle=True):
        """The seats, and who had to leave for them."""
        seats = [Seat(is_idle) for _ in range(count)]
        return seats, [gone for seat in seats if (gone := self.budgets.reserve(SEATS, account, seat)) is not None]

    def held(self, whose):
        return self.budgets.held(SEATS, whose)


@pytest.fixture
def room():
    return Room()


def test_one_account_has_all_that_nobody_else_asks_for(room):
    seats, gone = room.reserve(JOB, 12)
    assert not gone
    more, gone = room.reserve(JOB)
    assert gone == seats[:1], "the oldest of its own"
    assert room.held(Whose.AGENT) == 12
    assert room.refused == {("seats", Whose.AGENT): 1}
    assert room.budgets.reserve(SEATS, JOB, more[0]) is None, "it has it already"


def test_who_holds_less_takes_from_who_holds_most_until_both_have_their_part(room):
    seats, _ = room.reserve(JOB, 12)
    _, gone = room.reserve(OTHER, 6)
    assert gone == seats[:6]
    _, gone = room.reserve(OTHER)
    assert len(gone) == 1
    assert room.held(Whose.AGENT) == 12


def test_what_waits_for_its_client_goes_first_and_what_is_served_stays_with_equals(room):
    busy, _ = room.reserve(JOB, 5, is_idle=False)
    idle, _ = room.reserve(JOB, 1)
    room.reserve(OTHER, 6, is_idle=False)
    _, gone = room.reserve(Account(Whose.AGENT, "3"), 2, is_idle=False)
    assert gone[0] is idle[0]
    assert gone[1] not in busy, "of the other, who now holds most"
    served, gone = room.reserve(JOB, 1, is_idle=False)
    assert gone == served


def test_agents_and_strangers_leave_a_quarter_to_people(room):
    agents, _ = room.reserve(JOB, 12, is_idle=False)
    _, gone = room.reserve(ANN, 4, is_idle=False)
    assert not gone
    more, gone = room.reserve(JOB, is_idle=False)
    assert gone == more
    _, gone = room.reserve(BOB, is_idle=False)
    assert gone == agents[:1]
    assert room.held(Whose.PERSON) == 5


def test_a_person_who_takes_all_leaves_everybody_their_part(room):
    room.reserve(ANN, 20)
    assert room.held(Whose.PERSON) == 16
    _, gone = room.reserve(BOB, 8, is_idle=False)
    assert len(gone) == 8
    _, gone = room.reserve(JOB, 5, is_idle=False)
    assert room.held(Whose.AGENT) == 5


def test_strangers_have_a_quarter_at_most_and_one_address_does_not_have_it_alone(room):
    crowd, gone = room.reserve(account_at("10.0.0.1"), 6)
    assert gone == crowd[:2]
    _, gone = room.reserve(account_at("10.0.0.2"))
    assert gone == crowd[2:3]
    assert room.held(Whose.ANONYMOUS) == 4


def test_of_many_addresses_with_one_each_the_oldest_that_waits_makes_room(room):
    first, *_ = [room.reserve(account_at(f"10.0.0.{number}"))[0] for number in range(4)]
    _, gone = room.reserve(account_at("10.0.1.1"))
    assert gone == first


def test_a_person_may_have_no_more_than_the_limit_says_of_one(room):
    room.budgets = Budgets(
        room.clock, lambda *reported: room.refused.update([reported]), [SEATS._replace(of_a_person=2)]
    )
    seats, gone = room.reserve(ANN, 3)
    assert gone == seats[:1], "the oldest that idles makes room"
    for seat in seats[1:]:
        seat.is_idle = False
    late, gone = room.reserve(ANN, 1)
    assert gone == late
    assert not room.reserve(BOB, 2)[1]
    assert not room.reserve(JOB, 3)[1]


def test_what_is_moved_to_another_account_counts_there_alone(room):
    seats, _ = room.reserve(account_at("10.0.0.1"), 4)
    for seat in seats:
        assert room.budgets.reserve(SEATS, JOB, seat) is None
    assert (room.held(Whose.ANONYMOUS), room.held(Whose.AGENT)) == (0, 4)
    for seat in seats * 2:
        room.budgets.release(SEATS, seat)
    assert room.held(Whose.AGENT) == 0


def test_less_than_the_limit_says_is_shared_in_the_same_parts(room):
    room.budgets.shrink(SEATS, 8)
    room.reserve(JOB, 10)
    assert room.held(Whose.AGENT) == 6


def test_what_was_used_up_comes_back_evenly(room):
    spend = room.budgets.spend
    assert spend(DAILY, JOB, 900) == 0.0
    assert spend(DAILY, JOB, 200) == pytest.approx(8_640.0)
    assert spend(DAILY, OTHER, 1_000) == 0.0, "another account has its own"
    assert room.refused == {("bytes", Whose.AGENT): 1}
    room.clock.advance(8_641.0)
    assert spend(DAILY, JOB, 200) == 0.0
    room.clock.advance(10 * 86_400.0)
    assert spend(DAILY, JOB, 1_000) == 0.0
    assert spend(DAILY, JOB, 1) > 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("", "", True),
    ],
)
def test_a_network_of_ipv6_addresses_is_one_account(one, other, same):
    assert (account_at(one) == account_at(other)) is same


def identity(*scopes, name="n", grants=()):
    return Identity("id", "api", name, frozenset(scopes), JobFilter.of(""), None, grants=grants)


@pytest.mark.parametrize("scope", set(Scope) - {Scope.INGEST, Scope.ALERT})
def test_tokens_and_sessions_of_a_person_are_one_account(scope):
    assert account_of(identity(scope, Scope.INGEST, name="Ann")) == ANN
    assert account_of(identity(name="ann", grants=(GroupGrant(frozenset((scope,)), JobFilter.of("")),))) == ANN


@pytest.mark.parametrize("scopes", [[Scope.INGEST], [Scope.ALERT], [Scope.INGEST, Scope.ALERT]])
def test_a_token_that_only_sends_is_an_account_of_its_own(scopes):
    assert account_of(identity(*scopes)) == Account(Whose.AGENT, "id")
