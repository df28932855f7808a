"""The numbers that figures draw beyond those of the marts, against slow twins."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marts.figures import in_words, shortened, steps
from marts.report import inline_svg

CELLS = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=12)


@given(CELLS, st.integers(1, 30), st.randoms(use_true_random=False))
def test_steps_are_means_over_equal_parts_of_the_universes(
    cells: list[tuple[bool, int]], most: int, random: Random
) -> None:
    order = list(range(len(cells)))
    random.shuffle(order)
    count = min(most, len(cells))
    # every universe becomes `count` equal pieces: then a step is a whole number of pieces
    pieces = [cells[i][0] for i in order for _ in range(cells[i][1] * count)]
    size = len(pieces) // count
    expected = [sum(pieces[k * size : (k + 1) * size]) / size for k in range(count)]
    values, weight = (np.array([cell[part] for cell in cells], np.float64) for part in (0, 1))
    np.testing.assert_allclose(steps(values, np.array(order, np.intp), weight, most), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "most", "short"),
    [("sharp", 5, "sharp"), ("sharp", 4, "sh…p"), ("a_long_name_1", 6, "a_l…_1"), ("a_long_name_2", 6, "a_l…_2")],
)
def test_long_names_are_cut_in_their_middle(name: str, most: int, short: str) -> None:
    assert shortened(name, most) == short


def test_axes_and_metrics_have_names_for_readers() -> None:
    names = {"threshold_rule_id": "threshold rule", "budget_cm3": "budget (cm³)", "slice_aroc": "slice AROC"}
    assert {name: in_words(name) for name in names} == names


def test_a_picture_inside_a_page_keeps_only_identifiers_that_it_uses() -> None:
    svg = (
        '<?xml version="1.0"?>\n<svg xmlns="http://x" xmlns:xlink="http://y">\n <metadata>\n  <a/>\n </metadata>\n'
        ' <!-- a name -->\n <defs><path id="p1" d="M 0 0"/><path id="unused"/></defs>\n'
        ' <use xlink:href="#p1" clip-path="url(#p1)"/>\n</svg>\n'
    )
    assert inline_svg(svg, "flips", 'a "b" <c>') == (
        '<svg role="img" aria-label="a &quot;b&quot; &lt;c&gt;">\n'
        '<defs><path id="flips-p1" d="M 0 0"/><path/></defs>\n'
        '<use href="#flips-p1" clip-path="url(#flips-p1)"/>\n</svg>'
    )
