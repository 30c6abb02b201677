// Renders Markdown as elements, so that markup in an answer never becomes markup of the page. Incomplete Markdown of an
// answer that still grows renders as what it will most likely become.

import { element } from "./format.js";

const FENCE = /^\s{0,3}```(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?/;
const RULE = /^\s*(-{3,}|\*{3,}|_{3,})\s*$/;
const DASHES = /^[\s|:]*-[\s|:-]*$/;
const MAX_DEPTH = 20; // A model that repeats > for ever must not nest a thousand quotes.
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\][]+)\]\((https?:[^\s()]+)\)/g;

export function render(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const [block, next] = take(lines, at, depth);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

// Returns the block that begins at this line, and the line of the next one.
function take(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return code(lines, at);
  if (RULE.test(line)) return [element("hr"), at + 1];
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])), at + 1];
  if (QUOTE.test(line) && depth < MAX_DEPTH) return quote(lines, at, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

const begins = (lines, at) =>
  [FENCE, HEADING, QUOTE, ITEM, RULE].some((mark) => mark.test(lines[at])) || isTable(lines, at);

function code(lines, at) {
  let end = at + 1;
  while (end < lines.length && !FENCE.test(lines[end])) end += 1;
  const margin = indent(lines[at]); // of the fence, which may be indented in a list
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(margin, indent(line)))).join("\n");
  const language = FENCE.exec(lines[at])[1].trim();
  return [element("div", { class: "code" }, element("header", {}, language || "text", copier(() => text)), element("pre", {}, element("code", {}, text))), end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [element("blockquote", {}, ...render(lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1)), end];
}

// Items of one depth. Deeper lines belong to the item before them.
function list(lines, at, depth) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const made = element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(mark, 10) } : {});
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > margin.length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const inner = [];
    const start = item[1].length + item[2].length + 1; // where the text begins
    for (end += 1; end < lines.length && isWithin(lines, end, margin.length); end += 1) inner.push(lines[end].slice(Math.min(start, indent(lines[end]))));
    made.append(element("li", {}, ...inline(item[3]), ...render(inner.join("\n"), depth + 1)));
  }
  return [made, Math.max(end, at + 1)];
}

const indent = (line) => line.length - line.trimStart().length;
const isWithin = (lines, at, margin) => {
  let next = at;
  while (next < lines.length && !lines[next].trim()) next += 1;
  return next < lines.length && indent(lines[next]) > margin + (next === at ? 1 : 0);
};

const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && DASHES.test(lines[at + 1]);

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (line, kind) => element("tr", {}, ...cells(line).map((cell) => element(kind, {}, ...cell)));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [element("div", { class: "wide" }, element("table", {}, element("thead", {}, row(lines[at], "th")), element("tbody", {}, ...body))), end];
}

function inline(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, mono, strong, slanted, label, href] = found;
    parts.push(text.slice(from, found.index));
    if (mono) parts.push(element("code", {}, mono));
    else if (strong) parts.push(element("strong", {}, strong));
    else if (slanted) parts.push(element("em", {}, slanted));
    else parts.push(element("a", { href, rel: "noopener noreferrer", target: "_blank" }, label));
    from = found.index + all.length;
  }
  parts.push(text.slice(from));
  return parts.filter(Boolean);
}

// A button that copies the result of `text()`; null if the browser has no clipboard.
export function copier(text) {
  if (!navigator.clipboard) return null;
  const button = element("button", { type: "button", class: "link copy" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "copied";
    } catch {
      button.textContent = "not allowed";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  return button;
}
