"""Answers in Markdown look as another parser reads them, and never become markup of the page."""

from __future__ import annotations

from typing import Any

from markdown_it import MarkdownIt

from tests.page.scene import Scene
from tests.page.test_page import visit

ANSWERS = (
    "One line\nand the next.\n\nAnother *paragraph* with **weight**, `code < here` and a [link](https://example.org/a).",
    "# Title\n\n## Part\ntext under it",
    "Steps:\n\n1. first\n2. second with `x`\n   - inner\n   - inner two\n3. third\n\nDone.",
    "- one\n- two\n  - deeper\n    - deepest\n- three",
    "3. starts at three\n4. four",
    "```python\ndef f(a):\n    return a < 2 and '**not bold**'\n```\nafter",
    "```\nnever closed\n- no list",
    "| name | age |\n|------|-----|\n| Ada | 36 |\n| *Bob* | 41 |",
    "1. Write\n   ```python\n   def f():\n       return 1\n\n\n   f()\n   ```\n2. Run it",
    "> quoted\n> twice\n\n---\n\nbehind",
    "2 * 3 * 4 and snake_case_name and <b>no markup</b> & <script>alert(1)</script>",
)
# both as [tag, children] without what only one of them wraps around; headings are two levels lower on the page
READ = """
async ([texts, pages]) => {
  const { render } = await import("/weft/page/markdown.js");
  const level = (tag, by) => tag.replace(/^h([1-6])$/, (_, n) => `h${Math.min(Number(n) + by, 6)}`);
  const plain = (node, by) => [...node.childNodes].flatMap((child) => {
    if (child.nodeType === 3) return child.data.trim() ? [child.data.trim()] : [];
    const tag = child.localName;
    if (tag === "header") return [];
    if (tag === "div") return plain(child, by);
    return [[level(tag, by), child.start ?? child.getAttribute("href"), plain(child, by)]];
  });
  const box = document.createElement("div");
  const own = texts.map((text) => { box.replaceChildren(...render(text)); return plain(box, 0); });
  const theirs = pages.map((page) => plain(new DOMParser().parseFromString(page, "text/html").body, 2));
  return [own, theirs];
}
"""


async def test_markdown_is_read_as_markdown_it_reads_it(browser: Any, shown: Scene) -> None:
    oracle = MarkdownIt("commonmark", {"html": False}).enable("table")
    async with visit(browser, shown) as page:
        own, theirs = await page.evaluate(READ, [list(ANSWERS), [oracle.render(text) for text in ANSWERS]])
    for text, ours, expected in zip(ANSWERS, own, theirs, strict=True):
        assert ours == expected, text


async def test_every_beginning_of_an_answer_shows_without_an_end(browser: Any, shown: Scene) -> None:
    text = "\n\n".join(ANSWERS)
    count = """async (text) => {
      const { render } = await import("/weft/page/markdown.js");
      const made = [...text].map((_, at) => render(text.slice(0, at)).length);
      return [made.length, document.querySelectorAll("script").length];
    }"""
    async with visit(browser, shown) as page:
        assert await page.evaluate(count, text) == [len(text), 1]


async def test_an_answer_that_repeats_a_mark_for_ever_is_shown_and_at_once(browser: Any, shown: Scene) -> None:
    """Such is what models write that have lost their way; each quote within a quote took a place on the stack."""
    texts = [">" * 20_000, "> " * 20_000, "\n".join(" " * 2 * depth + "- x" for depth in range(200))]
    texts.append(f"|a|b|\n|{'-' * 200_000}x|")  # of which each dash was taken for the one that a table's line needs
    look = """async (texts) => {
      const { render } = await import("/weft/page/markdown.js");
      const began = performance.now();
      return [texts.map((text) => render(text).length), performance.now() - began];
    }"""
    async with visit(browser, shown) as page:
        blocks, milliseconds = await page.evaluate(look, texts)
    assert blocks == [1, 1, 1, 1]
    assert milliseconds < 1000
