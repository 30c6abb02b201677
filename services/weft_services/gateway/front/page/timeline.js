// Figures and lanes under an answer: which worker did what, and when. All values come from the gateway's
// `weft.timeline`; the page measures nothing.

import { bytes, count, element, milliseconds, percent } from "./format.js";

export function account(told) {
  return element("div", { class: "account" }, figures(told), lanes(told), note(told));
}

// Removes the names of bars that are too narrow; their titles keep them. Call it when the element is on the page.
export function fit(root) {
  for (const bar of root.querySelectorAll(".bar")) if (bar.scrollWidth > bar.clientWidth + 1) bar.textContent = "";
}

function figures(told) {
  const { elapsed_ms: at, tokens, workers, transfer } = told;
  const rate = told.itl_ms.mean > 0 ? 1000 / told.itl_ms.mean : 0;
  const rows = [
    ["first token", milliseconds(at.first_token)],
    ["between tokens", told.itl_ms.mean ? milliseconds(told.itl_ms.mean) : "–"],
    ["tokens/s", rate ? count(rate) : "–", `${count(tokens.completion)} tokens`],
    ["prompt", count(tokens.prompt), `${count(tokens.cached)} cached`],
  ];
  if (tokens.drafted) rows.push(["drafts accepted", count(tokens.accepted), `of ${count(tokens.drafted)}`]);
  const list = rows.map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, more ? element("small", {}, `  ${more}`) : null)));
  list.push(element("div", {}, element("dt", {}, "workers"), path(workers)));
  if (transfer.bytes) list.push(element("div", {}, element("dt", {}, "KV moved"), element("dd", {}, bytes(transfer.bytes))));
  return element("dl", { class: "figures" }, ...list);
}

function path({ prefill, decode }) {
  if (prefill === decode || !prefill) return element("dd", { class: "path d" }, decode);
  return element("dd", { class: "path" }, element("span", { class: "p" }, prefill), " → ", element("span", { class: "d" }, decode));
}

// Two scales side by side: up to the first token, and from there to the end, often a hundred times longer.
function lanes(told) {
  const { elapsed_ms: at, workers } = told;
  const rows = element("div", { class: "lanes", role: "img", "aria-label": spoken(told) });
  const first = at.first_token;
  const { front, prefill, move, decode, written } = spans(told);
  const isLocal = !workers.prefill || workers.prefill === workers.decode;
  const lane = (name, early, late = []) => rows.append(
    element("span", { class: "name" }, name), track(early, 0, first), track(late, first, at.end));
  lane("gateway", front);
  if (!isLocal) lane(workers.prefill, prefill);
  if (!isLocal) lane("KV pull", move, move); // The second token waits for the last block; the first does not.
  lane(workers.decode, isLocal ? [...decode, ...prefill] : decode, [["decode", "writes the answer", written, at.last_token]]);
  rows.append(
    element("span"),
    element("span", { class: "axis" }, element("span", {}, "0"), element("b", {}, `first token ${milliseconds(first)}`)),
    element("span", { class: "axis" }, element("span"), element("span", {}, `end ${milliseconds(at.end)}`)));
  return rows;
}

// [class, name, from, to] in milliseconds since the request arrived.
function spans(told) {
  const { elapsed_ms: at, decode_stages_ms: spent, prefill: work } = told;
  const reserved = at.routed + spent.routed;
  const began = reserved + spent.reserved;
  const computed = began + spent.prefilling;
  const arrived = computed + spent.transferring;
  const start = Math.max(computed - work.compute_ms, at.routed);
  return {
    front: [
      ["front", "tokenize", 0, at.prepared],
      ["front", "route", at.prepared, at.routed],
      ["front", "detokenize and wire", Math.min(computed, at.first_token), at.first_token],
    ],
    prefill: [
      ["wait", "queue", Math.max(start - work.queue_ms, at.routed), start],
      ["prefill", "computes the prompt", start, computed],
    ],
    move: [["move", "blocks still to come", computed, arrived]],
    written: Math.max(arrived, at.first_token),
    decode: [["wait", "reserves blocks", at.routed, reserved], ["wait", "asks prefill", reserved, began]],
  };
}

function track(bars, from, to) {
  const width = Math.max(to - from, 1e-6);
  const line = element("span", { class: "track" });
  for (const [kind, name, start, end] of bars) {
    if (end - start < 1e-3 || start >= to || end <= from) continue;
    const share = (Math.min(end, to) - Math.max(start, from)) / width;
    const bar = element("span", { class: `bar ${kind}`, title: `${name}: ${milliseconds(end - start)}` }, name);
    bar.style.left = `${((Math.max(start, from) - from) / width) * 100}%`;
    bar.style.width = `${Math.max(share, 0) * 100}%`;
    line.append(bar);
  }
  return line;
}

function note(told) {
  const { tokens, route, transfer, workers } = told;
  const parts = [];
  if (tokens.cached) {
    const store = tokens.from_store ? `, ${count(tokens.from_store)} of them from the shared store` : "";
    parts.push(`${percent(tokens.cached / tokens.prompt)} of the prompt came from caches${store}.`);
  }
  if (transfer.bytes) parts.push(`${milliseconds(transfer.exposed_ms)} of the hand-off did not overlap with computing.`);
  if (workers.prefill === workers.decode) parts.push("One worker computed the prompt and wrote the answer: no KV moved.");
  if (route.waited_ms > 1) parts.push(`The request waited ${milliseconds(route.waited_ms)} in the admission queue.`);
  if (told.num_attempts > 1) parts.push(`The request migrated to another worker: ${told.num_attempts} attempts.`);
  return parts.length ? element("p", { class: "note" }, parts.join(" ")) : null;
}

function spoken({ elapsed_ms: at, workers, decode_stages_ms: spent }) {
  return `Timeline: routed after ${milliseconds(at.routed)}, prompt computed by ${workers.prefill} in ` +
    `${milliseconds(spent.prefilling)}, hand-off ${milliseconds(spent.transferring)}, first token after ` +
    `${milliseconds(at.first_token)}, written by ${workers.decode} until ${milliseconds(at.end)}`;
}
