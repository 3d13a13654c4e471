"""Which digits of a page count as typed by hand."""

from __future__ import annotations

import pytest

from worklog.render.prose import unbound


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 17x slower.", "17x"), ("about 1.83 times", "1.83"), ("-5 %", "-5"), ("| a | 42 |", "42"),
        ("> box: 3 ms", "3"), ("an 8B model", "8B"), ("[17 ms](page.md)", "17"), ("* item 4", "4"), ("**12**", "12"),
        ("`code` 5", "5"), ("CUDA 12.8", "12.8"), ("1,234 kernels", "1,234"), ("3e-4", "3e-4"), ("x {{ n }} 7", "7"),
        ("{% if true %}\n9\n{% endif %}", "9"), ("<b>6</b>", "6"),
        ("~~~\na 1\n~~~\n2", "2"), ("0.13.0 is slow", "0.13.0"),
    ],
)  # fmt: skip
def test_found(text: str, number: str) -> None:
    (one,) = unbound(text)
    assert one.number == number


@pytest.mark.parametrize(
    "text",
    [
        "bf16, fp8, float8, e4m3, H200, L2, M1, sm_90, v0.18.0, Llama-3.1-8B, GPT-2",
        "`17x` and ``a ` 3``",
        "```bash\nsleep 5\n```",
        "> ```\n> 17\n> ```",
        "## 3 Kernel",
        "[text](page-2.md#s3) and <https://example.com/4> and https://example.com/5",
        "[section 4](#4-instruction)",
        "[1]: https://example.com/17",
        "<!-- 17\n18 -->",
        "1. first\n2. second\n   10) tenth",
        '<img width="640" src="a1.svg">',
        "{{ run('20260101-h200-x-1').a.b.median_ms | ms(4) }} {# 17 #}",
        "{% set base = run('20260101-a-b-c') %}",
        "{% set name = '20260101-a-b-c' %}",
        "{{ predict(3, 'x') }} {{ config.rows * 4 }} {{ cite(1.5, 'ms', 'Table 3') }}",
    ],
)
def test_free(text: str) -> None:
    assert unbound(text) == []


@pytest.mark.parametrize(
    "text",
    ["{{ 17.3 }}", "{{ 17.3 | ms }}", "{{ '17 ms' }}", "{% set x = 17 %}", "{{ 2 * 3 }}", "{% set x = {'a': 1.5} %}"],
)
def test_constants_in_expressions(text: str) -> None:
    assert unbound(text)


def test_a_figures_caption_is_prose() -> None:
    assert [one.number for one in unbound('{{ figure("a-1", x, "It is " ~ (q | ms) ~ " or 17 ms") }}')] == ["17"]
    assert unbound('{{ figure("a-1", x, "On an H200: " ~ (q | ms(4))) }}') == []


def test_lines_are_counted_through_code_and_comments() -> None:
    text = "a\n{# b\nc #}\n```\n1\n```\n<!-- 2\n-->\nhere 3\n\nthere 4\n"
    assert [(one.line, one.number) for one in unbound(text)] == [(9, "3"), (11, "4")]


def test_plain_markdown_keeps_its_braces() -> None:
    assert [one.number for one in unbound("{{ 5 }}", jinja=False)] == ["5"]
