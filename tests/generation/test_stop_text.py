import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.generation.stop_text import StopText


def run(stops, pieces):
    stop, out = StopText(stops), []
    for piece in pieces:
        out.append(stop.add(piece))
        if stop.found:
            return "".join(out), True
    return "".join([*out, stop.flush()]), False


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_at_the_first_stop(pieces, stops):
    out, found = run(stops, pieces)
    # where the pieces come to an end matters: a stop that ends later in the same piece may begin earlier
    so_far = ""
    for piece in pieces:
        so_far += piece
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            assert (out, found) == (so_far[: min(places)], True)
            return
    assert (out, found) == (so_far, False)


def test_what_cannot_be_a_stop_is_not_held_back():
    stop = StopText(["\nQ:"])
    assert [stop.add(piece) for piece in ["hello", "\n", "world", "\n", "Q", "q"]] == [
        "hello",
        "",
        "\nworld",
        "",
        "",
        "\nQq",
    ]


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopText(["end", ""])
