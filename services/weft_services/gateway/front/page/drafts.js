// Shades the text of an answer that came from drafts.

import { element } from "./format.js";

// A text that grows, and which of its characters came from drafts.
export class DraftedText {
  text = "";
  spans = []; // [from, to] of drafted characters, in order

  add(text, isDraft) {
    const from = this.text.length;
    this.text += text;
    if (!isDraft || !text) return;
    const last = this.spans.at(-1);
    if (last?.[1] === from) last[1] = this.text.length;
    else this.spans.push([from, this.text.length]);
  }

  // Returns `text.slice(from, to)` as strings and <mark>s.
  slice(from, to) {
    const parts = [];
    for (const [start, end] of this.spans) {
      if (end <= from || start >= to) continue;
      parts.push(this.text.slice(from, Math.max(start, from)), mark(this.text.slice(Math.max(start, from), Math.min(end, to))));
      from = Math.min(end, to);
    }
    return [...parts, this.text.slice(from, to)].filter(Boolean);
  }
}

// Marks drafts in the blocks that Markdown rendered from the text. Markdown drops characters but keeps their order, so
// each rendered line is found in the text behind the line before it.
export function shade(blocks, drafted) {
  if (!drafted.spans.length) return;
  let at = 0;
  for (const node of blocks.flatMap(texts)) {
    const parts = node.data.split(/(?<=\n)/).flatMap((line) => {
      const found = drafted.text.indexOf(line, at);
      if (found < 0) return [line];
      at = found + line.length;
      return drafted.slice(found, at);
    });
    node.replaceWith(...parts);
  }
}

function texts(block) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest(".code header")) found.push(walker.currentNode);
  return found;
}

export function legend() {
  return element("p", { class: "note" }, mark("Shaded text"), " comes from drafts that the model verified. They change the speed, not the text.");
}

const mark = (text) => element("mark", { class: "draft" }, text);
