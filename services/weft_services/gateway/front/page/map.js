// Draws the fleet: totals, one card per worker, the shared store. threads.js draws the threads between them.

import { byId, bytes, compact, count, drawing, element, percent } from "./format.js";

const MANY = 6; // Above this number of workers on a side, cards show only id, pool and speed.
const ROLES = ["prefill", "decode", "both"];
const cards = new Map(); // worker id -> its elements

// `steer` has the actions of the operator's buttons: { drain(id, undo), role(id, role) }
export function draw(fleet, steer) {
  totals(fleet);
  spine(fleet);
  const focused = document.activeElement;
  for (const role of ["prefill", "decode"]) side(fleet, role, steer);
  if (focused?.isConnected && document.activeElement !== focused) focused.focus(); // Its card moved to the other side.
  store(fleet.now.store, fleet.found);
}

function totals(fleet) {
  const { found } = fleet;
  const hits = found.pool + found.dram + found.nvme;
  const rows = [
    ["answers", compact(fleet.rate("generated")), "tok/s"],
    ["prompts computed", compact(fleet.rate("prompt")), "tok/s"],
    ["found in caches", found.looked ? percent(hits / found.looked) : "–", "of prompts"],
    ["hand-offs", fleet.handOffsPerSecond.toFixed(fleet.handOffsPerSecond < 10 ? 1 : 0), `/s, ${bytes(fleet.bytesPerSecond)}/s`],
  ];
  byId("totals").replaceChildren(...rows.map(([name, value, unit]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, unit)))));
}

function spine({ now }) {
  const waiting = now.waiting ? `${count(now.waiting)} waiting` : "queue empty";
  byId("spine").replaceChildren(
    node("gateway", `${count(now.in_flight)} in flight`), node("scheduler", waiting));
}

const node = (name, text) => element("div", { class: "node", id: `node-${name}` }, element("b", {}, name), element("small", {}, text));

function side(fleet, role, steer) {
  const isHere = (worker) => worker.role === role || (worker.role === "both" && role === "decode");
  const workers = fleet.now.workers.filter(isHere);
  const coming = fleet.now.arrivals.filter(isHere);
  const place = byId(role);
  if (!workers.length && !coming.length) {
    const others = fleet.now.workers.some((worker) => worker.role === "both");
    const words = others ? "The workers on the right do both." : `No ${role} worker is in the fleet.`;
    place.replaceChildren(element("div", { class: "empty" }, words));
    return;
  }
  place.classList.toggle("many", workers.length > MANY);
  const shown = workers.map((worker) => {
    const card = cards.get(worker.id) ?? make(worker.id, steer);
    fill(card, worker, fleet, role);
    return card.root;
  });
  shown.push(...coming.map(arriving));
  arrange(place, shown);
}

// Leaves cards in place where possible: moving a card loses the focus and closes its list of roles.
function arrange(place, shown) {
  for (const old of [...place.children]) if (!shown.includes(old)) old.remove();
  for (const [at, root] of shown.entries()) if (place.children[at] !== root) place.insertBefore(root, place.children[at] ?? null);
}

// A worker that loads its model: the phase, and its progress if known.
function arriving(arrival) {
  const done = arrival.total_bytes ? arrival.done_bytes / arrival.total_bytes : 0;
  const words = `${arrival.phase}${arrival.total_bytes ? ` ${percent(done)}` : ""}, ${count(Math.round(arrival.since_ms / 1000))} s`;
  const bar = element("i", { class: "loaded" });
  bar.style.width = `${done * 100}%`;
  return element("article", { class: "worker arriving", "data-worker": arrival.worker_id },
    element("header", {}, element("span", { class: "id", title: arrival.worker_id }, arrival.worker_id), element("span", { class: "status" }, words)),
    element("div", { class: "pool", role: "img", "aria-label": words, hidden: !arrival.total_bytes }, bar));
}

function make(id, steer) {
  const card = {
    status: element("span", { class: "status" }),
    button: element("button", { class: "drain", type: "button" }),
    role: element("select", { class: "role", title: `what new work ${id} takes` }, ...ROLES.map((role) => element("option", { value: role }, role))),
    pool: ["held", "kept", "stuck"].map((name) => element("i", { class: name })),
    lines: element("dl", { class: "lines" }),
    line: drawing("polyline"),
    area: drawing("polygon"),
    speed: element("b"),
  };
  card.root = element("article", { class: "worker" },
    element("header", {}, element("span", { class: "id", title: id }, id), card.status, element("span", { class: "steer" }, card.role, card.button)),
    element("div", { class: "pool", role: "img" }, ...card.pool), card.lines,
    element("div", { class: "speed" }, drawing("svg", { viewBox: "0 0 60 20", preserveAspectRatio: "none", "aria-hidden": "true" }, card.area, card.line), card.speed));
  card.role.setAttribute("aria-label", `role of ${id}`);
  card.role.addEventListener("change", async () => {
    if (!(await steer.role(id, card.role.value))) card.role.value = card.now;
  });
  card.button.addEventListener("click", () => steer.drain(id, card.button.dataset.undo === "1"));
  cards.set(id, card);
  return card;
}

function fill(card, worker, fleet, role) {
  const { blocks } = worker;
  const isAway = worker.state === "not ready" || worker.state === "asleep";
  card.root.className = `worker ${role} ${worker.state === "draining" ? "draining" : ""} ${isAway ? "away" : ""}`;
  card.root.dataset.worker = worker.id;
  card.status.textContent = worker.state === "ready" ? "" : worker.state;
  card.role.hidden = !fleet.hello?.is_operator || !worker.can_change_role;
  card.now = worker.role;
  if (document.activeElement !== card.role) card.role.value = worker.role;
  card.button.hidden = !fleet.hello?.is_operator;
  card.button.textContent = worker.state === "draining" ? "undrain" : "drain";
  card.button.setAttribute("aria-label", `${card.button.textContent} ${worker.id}`);
  card.button.dataset.undo = worker.state === "draining" ? "1" : "0";
  const shares = [blocks.active, blocks.cached, blocks.quarantined].map((n) => (blocks.total ? n / blocks.total : 0));
  card.pool.forEach((part, at) => { part.style.width = `${shares[at] * 100}%`; });
  card.pool[0].parentElement.setAttribute("aria-label", `KV pool: ${percent(shares[0])} in use, ${percent(shares[1])} kept as cache`);
  const tokens = role === "prefill" ? worker.queued_prefill_tokens : worker.active_tokens;
  const rows = [
    ["KV blocks", `${percent(shares[0])} of ${compact(blocks.total)}`],
    [role === "prefill" ? "to compute" : "in flight", `${compact(tokens)} tokens`],
    ["sequences", worker.waiting ? `${count(worker.running)} + ${count(worker.waiting)} waiting` : count(worker.running)],
  ];
  if (worker.layout) rows.unshift(["ranks", worker.layout]);
  if (new Set(fleet.now.workers.map((each) => each.model)).size > 1) rows.unshift(["model", worker.model]);
  const { looked_up_tokens: looked, pool_tokens: pool, dram_tokens: dram, nvme_tokens: nvme } = worker.prefix;
  if (role === "prefill") rows.push(["from caches", looked ? percent((pool + dram + nvme) / looked) : "–"]);
  card.root.title = rows.map((row) => row.join(" ")).join("\n");
  card.lines.replaceChildren(...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  spark(card, fleet.rates.get(worker.id)[role === "prefill" ? "prompt" : "generated"]);
}

function spark(card, series) {
  const top = Math.max(...series, 1);
  const points = series.map((value, at) => `${60 - series.length + 1 + at},${(19 - (value / top) * 17).toFixed(2)}`);
  card.line.setAttribute("points", points.join(" "));
  card.area.setAttribute("points", `${60 - series.length + 1},20 ${points.join(" ")} 60,20`);
  card.speed.textContent = `${compact(series.at(-1) ?? 0)} tok/s`;
}

function store(use, found) {
  const rows = element("div", { class: "tiers" });
  const tier = (name, used, total, hits) => {
    const bar = element("i");
    bar.style.width = `${Math.min(used / total, 1) * 100}%`;
    rows.append(
      element("span", {}, name),
      element("div", { class: "pool", role: "img", "aria-label": `${name}: ${bytes(used)} of ${bytes(total)}` }, bar),
      element("span", {}, `${bytes(used)} of ${bytes(total)}`, element("span", { class: "quiet" }, ` · ${compact(hits)} tokens served`)));
  };
  if (use) {
    tier("memory", use.memory_used_bytes, use.memory_bytes, found.dram);
    if (use.disk_bytes) tier("disk", use.disk_used_bytes, use.disk_bytes, found.nvme);
  }
  const words = use ? "keeps blocks when a worker forgets them" : "not running: workers cache in their own pools only";
  byId("store").replaceChildren(element("h2", {}, "Shared store ", element("span", { class: "quiet" }, words)), ...(use ? [rows] : []));
}
