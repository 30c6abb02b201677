// Draws the threads between prefill and decode workers, and the pulse of each hand-off.

import { byId, count, drawing } from "./format.js";

const GLOW_MS = 1600;
const MAX_THREADS = 160;
const MAX_LABELS = 6;
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

// Redraws the curves when the cards move.
export function weave(fleet) {
  const svg = byId("threads");
  const frame = svg.getBoundingClientRect();
  if (!frame.width) return; // The map is hidden.
  const box = (root) => {
    const at = root.getBoundingClientRect();
    return { left: at.left - frame.left, right: at.right - frame.left, y: at.top - frame.top + Math.min(at.height / 2, 24), top: at.top - frame.top, bottom: at.bottom - frame.top };
  };
  const boxes = new Map([...document.querySelectorAll(".worker")].map((root) => [root.dataset.worker, box(root)]));
  const old = new Map([...svg.querySelectorAll("path[data-thread]")].map((path) => [path.dataset.thread, path]));
  if (!svg.querySelector("defs")) svg.append(gradient(), ...["prefill", "decode"].map((role) => drawing("path", { class: "plan", id: `plan-${role}` })));
  plan(frame);
  const shown = [...fleet.threads].slice(0, MAX_THREADS);
  for (const [at, [key, thread]] of shown.entries()) {
    const from = boxes.get(thread.prefill);
    const to = boxes.get(thread.decode);
    if (!from || !to || from === to) continue;
    const path = old.get(key) ?? svg.appendChild(drawing("path", { "data-thread": key }));
    old.delete(key);
    path.setAttribute("d", curve(from, to));
    label(svg, key, thread.prompts, shown.length > MAX_LABELS ? null : along(from, to, 0.28 + (0.44 * (at + 0.5)) / shown.length));
  }
  for (const [key, path] of old) { path.remove(); svg.querySelector(`text[data-thread="${CSS.escape(key)}"]`)?.remove(); }
}

// The fixed curves from the scheduler to both sides.
function plan(frame) {
  const spine = byId("spine").getBoundingClientRect();
  const start = { x: spine.left - frame.left + spine.width / 2, y: spine.bottom - frame.top };
  for (const role of ["prefill", "decode"]) {
    const side = byId(role).getBoundingClientRect();
    const end = { x: side.left - frame.left + side.width / 2, y: side.top - frame.top - 30 };
    const middle = (start.y + end.y) / 2;
    byId(`plan-${role}`).setAttribute("d", `M${start.x} ${start.y}C${start.x} ${middle} ${end.x} ${middle - 4} ${end.x} ${end.y}`);
  }
}

function curve(from, to) {
  const bend = (to.left - from.right) / 2;
  return `M${from.right} ${from.y}C${from.right + bend} ${from.y} ${to.left - bend} ${to.y} ${to.left} ${to.y}`;
}

// The point at the fraction `t` of a cubic curve.
function along(from, to, share) {
  const bend = (to.left - from.right) / 2;
  const rest = 1 - share;
  const mix = (a, b, c, d) => rest ** 3 * a + 3 * rest ** 2 * share * b + 3 * rest * share ** 2 * c + share ** 3 * d;
  return { x: mix(from.right, from.right + bend, to.left - bend, to.left), y: mix(from.y, from.y, to.y, to.y) };
}

// Labels each thread with its number of prompts, at a different place per thread. Many threads have no labels.
function label(svg, key, prompts, place) {
  let text = svg.querySelector(`text[data-thread="${CSS.escape(key)}"]`);
  if (!place || !prompts) { text?.remove(); return; }
  text ??= svg.appendChild(drawing("text", { "data-thread": key }));
  text.setAttribute("x", place.x);
  text.setAttribute("y", place.y + 4);
  text.textContent = count(prompts);
}

// A gradient in the page's colours, in user space because a straight line has no bounding box.
function gradient() {
  const stops = [["0.38", "--prefill-fill"], ["0.62", "--decode-fill"]].map(([offset, colour]) => {
    const stop = drawing("stop", { offset });
    stop.style.stopColor = `var(${colour})`;
    return stop;
  });
  return drawing("defs", {}, drawing("linearGradient", { id: "weave", gradientUnits: "userSpaceOnUse", x1: "0", x2: "100%" }, ...stops));
}

export function light(prefill, decode) {
  const svg = byId("threads");
  const path = svg.querySelector(`path[data-thread="${CSS.escape(`${prefill} ${decode}`)}"]`);
  if (!path) return;
  path.classList.add("hot");
  path.style.strokeWidth = "3";
  clearTimeout(path.dataset.timer);
  path.dataset.timer = setTimeout(() => { path.classList.remove("hot"); path.style.strokeWidth = ""; }, GLOW_MS);
  if (isStill.matches || document.hidden) return; // Do not animate a hidden page.
  const shuttle = svg.appendChild(drawing("circle", { r: "4.5" }));
  const length = path.getTotalLength();
  const started = performance.now();
  const step = (now) => {
    const share = Math.min((now - started) / 700, 1);
    const eased = share < 0.5 ? 2 * share * share : 1 - (2 - 2 * share) ** 2 / 2;
    const point = path.getPointAtLength(eased * length);
    shuttle.setAttribute("cx", point.x);
    shuttle.setAttribute("cy", point.y);
    if (share < 1) requestAnimationFrame(step);
    else shuttle.remove();
  };
  requestAnimationFrame(step);
}
