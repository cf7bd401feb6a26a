"""Times of day that say when a request was made: found in a line, taken out, the date left where it is.

A time counts directly after a date, or in a line that says now, current time, local time and the like in common
languages.  Opening hours, ranges and "John 3:16" stay.  Every pattern has bounded parts only, so matching is linear.
"""

import re
from dataclasses import dataclass
from itertools import islice

_DIGIT = re.compile(r"\d")
_TIME = re.compile(
    r"(?:T|[ ,]{0,2})(?<![\d:.])(?:"
    r"(?:(?:上午|下午|凌晨|早上|中午|晚上|午前|午後|오전|오후) ?)?\d{1,2}"
    r"(?:[:：][0-5]\d(?:[:：][0-5]\d(?:[.,]\d{1,9})?)?|[时時시](?: ?[0-5]?\d[分분](?: ?[0-5]?\d[秒초])?)?|[hH][0-5]\d)"
    r"(?: ?[AaPp](?:[Mm]\b|\.[Mm]\b\.?))?"
    r"|\d{1,2} ?[AaPp](?:[Mm]\b|\.[Mm]\b\.?)"
    r")(?: ?(?:UTC|GMT|Z)\b)?(?:[+-]\d{2}:?\d{2}\b)?(?![:：]?\d)"
)
_MONTH = (
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mär|mai|okt|dez|janv|févr|mars|avr|juin|juil|août|sept|déc|"
    r"ene|abr|ago|dic|gen|mag|giu|lug|set|ott|fev|out|янв|фев|мар|апр|мая|июн|июл|авг|сен|окт|ноя|дек)[^\W\d_]{0,8}"
)
_DATE_BEFORE = re.compile(
    r"(?:(?<!\d)\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|(?<!\d)\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    r"|(?<!\d)\d{4} ?[年년] ?\d{1,2} ?[月월] ?\d{1,2} ?[日일]"
    rf"|\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?,? {{0,2}}\d{{4}}"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th|er|º|\.)?,? (?:de |of )?{_MONTH}\.?,? (?:de )?\d{{4}}"
    r")(?:[ ,]{0,2}[(（]?(?:[^\W\d_]{2,12}|星期.|周.|[日月火水木金土](?:曜日)?)\.?[)）]?)?"
    r"[ ,，;·|–—-]{0,3}(?:(?:at|um|à|a las|alle|ore|kl|às|om|o|в) ?)?$",
    re.IGNORECASE,
)
_GAP = (
    r"[\s:：=,;(–-]*(?:(?:is|at|it|the|date|and|time|local|ist|es|est|sono|le|son|las|é|um|à|是|为|為|は|"
    r"in [^\s\d]{2,30}|\([^()\d]{1,20}\))[\s:：=,;)–-]+){0,6}$"
)
_SAYS_NOW = re.compile(
    r"(?:\b(?:now|right now|currently|current(?: \w{3,8}){0,3} time|local time|the time is|it is now|timestamp|now_utc)"
    r"|^[\s>*#-]{0,4}(?:the )?(?:time|clock|date ?(?:and|/|&) ?time|datetime)"
    r"|现在|現在|当前时间|當前時間|北京时间|当地时间|本地时间|[今現]在?の時[刻間]|時刻|지금|현재(?: 시간)?"
    r"|\b(?:jetzt|aktuelle (?:uhr)?zeit|uhrzeit|ortszeit|maintenant|heure (?:actuelle|locale)|il est|ahora"
    r"|hora (?:actual|local)|adesso|ora (?:attuale|locale)|agora|hora atual|сейчас|текущее время|местное время)"
    r"|الآن|الوقت الحالي)" + _GAP,
    re.IGNORECASE,
)
_NOW_AFTER = re.compile(r"[ ,]{0,2}(?:right )?now\b(?! on)", re.IGNORECASE)
_IT_IS = re.compile(r"\b(?:it is|it's|time:?|time is) ?$", re.IGNORECASE)
_YEAR_OR_DAY_ENDS = re.compile(r"(?:\d{4}|[-/.]\d{1,2}|\d ?[日일])\D{0,40}$")  # a cheap look before the dear one
_OFFSET_IS_END = re.compile(
    r"[ ,]{0,2}\d{1,2}[:：]\d\d-\d\d:?\d\d$"
)  # 10:00-12:00 is a range, 10:00:00-05:00 an offset
_RANGE_AFTER = re.compile(r" ?(?:[-–—~]|to|until|till|bis|à|a|至|到) ?\d", re.IGNORECASE)
_RANGE_BEFORE = re.compile(
    r"\d(?: ?[ap]\.?m\.?)? ?(?:[-–—~至到]|to|until|till|bis|and) ?$|\b(?:from|between|von|open)[^.]{0,20}$",
    re.IGNORECASE,
)
CONTEXT_CHARACTERS = 40
NEAR_CHARACTERS = 80
MOST_TIMES = 256
"""A text with more times of day is a timetable or a log; the clock in it, if there is one, is not looked for."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line without its times, and what the note says of each: at most 40 characters before it, and the time."""

    line: str
    notes: tuple[str, ...]


def without_times(line: str) -> Told:
    """Take the times of day that say *now* out of `line` (no line break in it); linear in its length."""
    if _DIGIT.search(line) is None:  # most lines
        return Told(line, ())
    matches = list(islice(_TIME.finditer(line), MOST_TIMES + 1))
    if len(matches) > MOST_TIMES:
        return Told(line, ())
    kept: list[str] = []
    notes: list[str] = []
    at = 0
    for match in matches:
        if match.start() < at or not _says_now(line, match):
            continue
        kept.append(line[at : match.start()])
        notes.append(_context(line, match))
        at = match.end()
    return Told("".join([*kept, line[at:]]), tuple(notes))


def is_timetable(text: str) -> bool:
    """Say whether `text` holds more times of day than a prompt that says the time; this bounds the work on it."""
    return next(islice(_TIME.finditer(text), MOST_TIMES, None), None) is not None


def _says_now(line: str, match: re.Match[str]) -> bool:
    before = line[max(0, match.start() - NEAR_CHARACTERS) : match.start()]
    after = line[match.end() : match.end() + NEAR_CHARACTERS]
    clock = match.group().lstrip(" ,T")
    lead = before if match.group().startswith(clock) else before + " "
    if _OFFSET_IS_END.match(match.group()) or _RANGE_AFTER.match(after) or _RANGE_BEFORE.search(lead):
        return False
    if _YEAR_OR_DAY_ENDS.search(before) and _DATE_BEFORE.search(before):
        return True
    if _SAYS_NOW.search(lead) is not None:
        return True
    return _NOW_AFTER.match(after) is not None and _IT_IS.search(lead) is not None


def _context(line: str, match: re.Match[str]) -> str:
    """Return what stands before the time, from the start of its sentence or word, and the time."""
    start = max(0, match.start() - CONTEXT_CHARACTERS)
    before = line[start : match.start()]
    if start > 0 and not line[start - 1].isspace():
        before = before.partition(" ")[2] or before
    sentence = max(before.rfind(mark) for mark in (". ", "! ", "? ", "。"))
    if sentence >= 0 and before[sentence + 1 :].strip():
        before = before[sentence + 1 :]
    return (before + match.group()).strip()
