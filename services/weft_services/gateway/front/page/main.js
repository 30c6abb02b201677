// Connects the fleet, the two views and the operator's buttons.

import { start } from "./chat.js";
import { Fleet, watch } from "./fleet.js";
import { byId, count, element } from "./format.js";
import { draw } from "./map.js";
import { headers, refusal, why } from "./sse.js";
import { light, weave } from "./threads.js";

const fleet = new Fleet();
let lengths = new Map();

start(() => byId("model").value);

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const each of document.querySelectorAll("[data-show]")) each.setAttribute("aria-pressed", String(each === button));
    weave(fleet);
  });
}

// The models that the key may use. They are available even if the mesh is not shown.
async function learnModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await refusal(response));
  const { data } = await response.json();
  const chosen = byId("model").value;
  byId("model").replaceChildren(...data.map(({ id }) => element("option", { value: id, selected: id === chosen }, id)));
  byId("model").disabled = data.length < 2;
  lengths = new Map(data.map(({ id, max_model_len: length }) => [id, length]));
  named();
}

function named() {
  const model = byId("model").value;
  byId("context").textContent = lengths.has(model) ? `${count(lengths.get(model))} tokens of context` : "";
  document.title = `Weft · ${model}`;
}

byId("model").addEventListener("change", named);
new ResizeObserver(() => weave(fleet)).observe(byId("map"));

// Screen readers announce every write, and snapshots arrive once per second: write only a change.
function state(kind, text) {
  byId("state").className = `state ${kind}`;
  if (byId("state").title === text) return;
  byId("state").lastElementChild.textContent = text;
  byId("state").title = text;
}

function complain(text) {
  byId("mesh-trouble").textContent = text;
  byId("mesh-trouble").hidden = !text;
}

async function ask(id, verb, body) {
  complain("");
  try {
    const response = await fetch(`/weft/workers/${encodeURIComponent(id)}/${verb}`, {
      method: "POST", body: JSON.stringify(body), headers: headers({ "content-type": "application/json" }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    return true;
  } catch (error) {
    complain(why(error));
    return false;
  }
}

// True for the last worker that accepts new work of a role. Without it every request is rejected.
function isLast(id) {
  const workers = fleet.now.workers.filter((each) => each.state === "ready" || each.state === "full");
  const one = workers.find((each) => each.id === id);
  const does = (each, role) => each.model === one.model && (each.role === role || each.role === "both");
  return Boolean(one) && ["prefill", "decode"].some((role) => does(one, role) && workers.filter((each) => does(each, role)).length === 1);
}

const steer = {
  drain: (id, undo) => {
    if (!undo && isLast(id) && !confirm(`${id} is the last worker that accepts this work. Requests will be rejected until another one does. Drain it?`)) return;
    ask(id, undo ? "undrain" : "drain", {});
  },
  role: (id, role) => ask(id, "role", { role }),
};

// Draws once per frame, however many hand-offs arrive in it.
const handedOff = new Map();

function shine() {
  weave(fleet);
  for (const [prefill, decode] of handedOff.values()) light(prefill, decode);
  handedOff.clear();
}

watch(fleet, {
  hello: () => {
    complain("");
    learnModels().catch((error) => complain(error.message));
  },
  picture: (moved) => {
    const { ready, reasons } = fleet.now;
    state(ready ? "ready" : "bad", ready ? "ready" : reasons.join("; "));
    draw(fleet, steer);
    weave(fleet);
    for (const [prefill, decode] of moved) light(prefill, decode);
  },
  handOff: ({ prefill, decode }) => {
    if (!handedOff.size) requestAnimationFrame(shine);
    handedOff.set(`${prefill} ${decode}`, [prefill, decode]);
  },
  lost: (why) => {
    state("bad", `not connected: ${why}`);
    if (!lengths.size) learnModels().catch(() => {}); // Models may be available although the fleet is not.
  },
  refused: (why, isKnown) => {
    state(isKnown ? "" : "bad", isKnown ? "the map is for operators" : "enter an API key under Settings");
    complain(`The mesh is shown to operators only; enter an operator's key under Settings: ${why}`);
    byId("settings").open ||= !isKnown;
    learnModels().catch(() => {});
  },
});
