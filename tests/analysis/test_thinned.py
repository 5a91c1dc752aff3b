from hypothesis import given
from hypothesis import strategies as st

from recurra.analysis.gradient_flow import Thinned


@given(n=st.integers(0, 300), limit=st.integers(2, 20))
def test_it_is_every_nth_item_with_the_least_n_that_fits(n, limit):
    thinned = Thinned(limit)
    for item in range(n):
        thinned.add(item)
        assert len(thinned.items) <= limit
    stride = 1
    while len(range(0, n, stride)) > limit:
        stride *= 2
    assert thinned.items == list(range(0, n, stride))
