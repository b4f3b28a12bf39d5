"""Stop strings across any cut of the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopMatcher


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        matched = matcher.feed(piece)
        text += matched.text
        if matched.match is not None:
            return text, matched.match
    return text + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["abc", "ENDxyz"], ("abc", "END")),
        (["END"], ["abE", "N", "Dx"], ("ab", "END")),
        (["END"], ["EN", "EN", "D"], ("EN", "END")),
        (["END"], ["abEN"], ("abEN", None)),
        (["aab"], ["aaa", "ab"], ("aa", "aab")),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", "\n\n")),
        (["b", "ab"], ["xab"], ("x", "ab")),
        (["abc", "b"], ["xabc"], ("xa", "b")),
        (["你好"], ["说你", "好吗"], ("说", "你好")),
        ([], ["anything"], ("anything", None)),
    ],
)
def test_by_hand(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stops, pieces) == expected


def test_nothing_is_given_out_that_could_be_the_beginning() -> None:
    matcher = StopMatcher(["<stop>"])
    assert matcher.feed("a<st").text == "a"
    assert matcher.feed("e").text == "<ste"


def test_disabled_matches_are_ordinary_text() -> None:
    matcher = StopMatcher(["aa", "aab"])
    assert matcher.feed("aa", enabled=False).match is None
    second = matcher.feed("x")
    assert (second.text, second.match) == ("aax", None), "a match that was complete before does not count later"
    assert matcher.feed("aa").match == "aa"


texts = st.text("ab", max_size=30)


@given(text=texts, stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data())
def test_the_cut_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        assert run(stops, pieces) == (text, None)
    else:
        end, _, stop = min(ends)
        assert run(stops, pieces) == (text[: end - len(stop)], stop)
