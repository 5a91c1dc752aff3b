import pytest

from tools.pages import markdown


def test_a_table():
    assert markdown.table(["a", "b"], [["1", "2"], ("3", "4")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"


def test_paragraphs_and_items_are_broken_into_lines():
    assert markdown.paragraph("one\n  two ") == "one two\n"
    words = "word " * 40
    assert max(map(len, markdown.paragraph(words).splitlines())) <= markdown.WIDTH
    first, second = markdown.item(words).splitlines()
    assert first.startswith("- word")
    assert second.startswith("  word")
    assert markdown.paragraph("x" * 200) == "x" * 200 + "\n"


def test_numbers_with_digits_after_the_point():
    numbers = [(1234.56, 1), (0.5, 0), (None, 2), (float("nan"), 0)]
    assert [markdown.show(*number) for number in numbers] == ["1,234.6", "0", "-", "-"]


@pytest.mark.parametrize(
    ("number", "shown"),
    [(1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.12"), (0.00123, "0.0012"), (None, "-")],
)
def test_numbers_with_about_three_digits(number, shown):
    assert markdown.short(number) == shown
