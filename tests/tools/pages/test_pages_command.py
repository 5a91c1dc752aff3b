"""`python -m tools.pages` chooses a page."""

from tools.pages.__main__ import PAGES, main


def test_help_lists_the_pages(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in PAGES)
    assert main([]) == 2


def test_an_unknown_page_is_refused(capsys):
    assert main(["nothing"]) == 2
    assert "unknown page 'nothing'" in capsys.readouterr().err
