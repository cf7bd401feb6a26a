"""Times of day that say now, in many languages; and all the digits with colons that are something else."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.clock import CONTEXT_CHARACTERS, MOST_TIMES, is_timetable, without_times

# Each line as told, what stays of it, the time that the note must hold.
NOW = [
    (
        "You help. Now: 2026-01-02 10:00:01 UTC. Rules: be brief.",
        "You help. Now: 2026-01-02. Rules: be brief.",
        "10:00:01 UTC",
    ),
    ("2026-01-02T10:00:01Z", "2026-01-02", "10:00:01Z"),
    ("2026-01-02T10:00:01.123456+00:00", "2026-01-02", "10:00:01.123456+00:00"),
    ("Current date: 2026-01-02, 10:00:01", "Current date: 2026-01-02", "10:00:01"),
    ("Today is 01/02/2026 10:15 PM.", "Today is 01/02/2026.", "10:15 PM"),
    ("Today is 1/2/2026, 3:05:09 p.m.", "Today is 1/2/2026", "3:05:09 p.m."),
    ("Date: January 2, 2026 at 3:05 PM (local)", "Date: January 2, 2026 at (local)", "3:05 PM"),
    ("Friday, January 2nd, 2026 15:04", "Friday, January 2nd, 2026", "15:04"),
    ("2 January 2026, 15:04", "2 January 2026", "15:04"),
    ("The current time is 15:04.", "The current time is.", "15:04"),
    ("Current local time: 3 PM", "Current local time:", "3 PM"),
    ("The time is 09:41 right now.", "The time is right now.", "09:41"),
    ("It is now 7:30 am in Berlin", "It is now in Berlin", "7:30 am"),
    ("- Time: 08:00:00", "- Time:", "08:00:00"),
    ("Local time in Tokyo: 23:59", "Local time in Tokyo:", "23:59"),
    ("Heute ist der 02.01.2026, 14:30 Uhr.", "Heute ist der 02.01.2026 Uhr.", "14:30"),
    ("Freitag, 2. Januar 2026 um 14:30", "Freitag, 2. Januar 2026 um", "14:30"),
    ("Aktuelle Uhrzeit: 14:30", "Aktuelle Uhrzeit:", "14:30"),
    ("Il est 14h30.", "Il est.", "14h30"),
    ("vendredi 2 janvier 2026 à 14:30", "vendredi 2 janvier 2026 à", "14:30"),
    ("Heure actuelle : 14:30", "Heure actuelle :", "14:30"),
    ("Hora actual: 14:30", "Hora actual:", "14:30"),
    ("2 de enero de 2026, 14:30", "2 de enero de 2026", "14:30"),
    ("现在是 14:30", "现在是", "14:30"),
    ("当前时间：2026年1月2日 14:30:05", "当前时间：2026年1月2日", "14:30:05"),
    ("当前时间：2026年1月2日 星期五 下午2:30", "当前时间：2026年1月2日 星期五", "下午2:30"),
    ("現在の時刻：14時30分", "現在の時刻：", "14時30分"),
    ("今は2026年1月2日(金) 14:30です", "今は2026年1月2日(金)です", "14:30"),
    ("时间2026-01-02 14:30", "时间2026-01-02", "14:30"),
    ("현재 시간: 14:30", "현재 시간:", "14:30"),
    ("2026년 1월 2일 오후 2시 30분", "2026년 1월 2일", "오후 2시 30분"),
]

NOT_NOW = [
    "Our shop is open 9:00 to 17:00.",
    "Open from 9 am to 5 pm, Monday to Friday.",
    "Opening hours: 09:00-18:00",
    "Open Monday 10:00 – 18:30",
    "Standup is at 10:30 every day.",
    "The meeting starts at 14:00.",
    "Maintenance on 2026-01-02 10:00-12:00",
    "Maintenance on 2026-01-02 from 10:00 to 12:00",
    "John 3:16 is quoted often.",
    "See Romans 8:28 and 12:2.",
    "Mix them at a ratio of 3:2.",
    "Ratio 16:09 or 4:30",
    "Version 10:30.1 and 2.10.30",
    "The score was 3:15 at half time.",
    "The current score is 3:15.",
    "Connect to ::1 or fe80::1:22:33 or 2001:db8::10:20.",
    "MAC 00:11:22:33:44:55",
    "The video lasts 10:30.",
    "Duration: 01:30:00",
    "Current duration 01:30:00 of a song",
    "From now on answer before 10:30.",
    "From now on, wake me at 7:00 am.",
    "Run it now and again at 10:30.",
    "cron: 30 10:30 * * *",
    "Line 10:30: error",
    "Trains: 10:05, 10:35, 11:05.",
    "He was born at 4:20 in the morning.",
    "Use 12:30 as the example time.",
    "Call us between 9:00 and 12:00.",
    "Geöffnet von 9:00 bis 17:00 Uhr.",
    "营业时间 9:00至18:00",
    "The event on 2026-01-02 is at noon.",
    "10.0.0.1:8080",
    "nowhere 10:30",
    "Knowledge cutoff: 2025-01. Always answer at 10:30.",
]


@pytest.mark.parametrize(("line", "kept", "told"), NOW)
def test_a_time_that_says_now_is_told_apart(line: str, kept: str, told: str) -> None:
    """The date and every other word stay, the note holds the time and at most 40 characters before it."""
    found = without_times(line)
    assert found.line.replace("  ", " ") == kept.replace("  ", " ")
    assert len(found.notes) == 1 and found.notes[0].endswith(told)
    assert len(found.notes[0]) <= CONTEXT_CHARACTERS + len(told) + 2


@pytest.mark.parametrize("line", NOT_NOW)
def test_other_numbers_stay(line: str) -> None:
    """Opening hours, ranges, verses, ratios, versions, scores, addresses, durations, schedules."""
    assert without_times(line) == type(without_times(""))(line, ())


@given(st.text(alphabet="0123456789:. -TZAPMapmnowUTC年月日时分\t", max_size=120))
@settings(max_examples=200, deadline=None)
def test_nothing_but_times_goes_out_of_a_line(line: str) -> None:
    """What stays is the line with pieces taken out, and each piece ends a note."""
    found = without_times(line)
    at, left = 0, line
    for note in found.notes:
        assert note.strip() == note and note
    for char in found.line:
        at = left.find(char, at)
        assert at >= 0
        at += 1
    assert (found.line == line) == (not found.notes)


@pytest.mark.parametrize(
    "piece", ["1", ":", "1:", "10:30", "10:30:", "10:30 ", " ", "now ", "2026-01-02 ", "2026-01-02 10:30:11 ", "T",
    "at ", "the ",
     "is it the date and ", "Jan 2, ", "now " + " " * 60, "from ", "(a) ", "下午", "10 pm ", "open ", "in ab "],
)  # fmt: skip
def test_a_megabyte_takes_less_than_a_second(piece: str) -> None:
    """No line makes the search slower than linear."""
    line = (piece * (1_000_000 // len(piece) + 1))[:1_000_000]
    began = time.process_time()
    without_times(line)
    without_times(line[: len(line) // 2] + " now: 10:30")
    assert time.process_time() - began < 4


def test_hundreds_of_times_are_left_alone() -> None:
    """They are a timetable or a log, not a clock: this bounds the work, and the note."""
    line = "It is now 10:30. " * (MOST_TIMES + 1)
    assert without_times(line).line is line and is_timetable(line)
    assert len(without_times("It is now 10:30. " * 20).notes) == 20
