// The playground: one conversation, streamed from /v1/chat/completions with the gateway's timeline.

import { DraftedText, legend, shade } from "./drafts.js";
import { byId, element } from "./format.js";
import { copier, render } from "./markdown.js";
import { events, headers, refusal, why } from "./sse.js";
import { account, fit } from "./timeline.js";

const IDEAS = [
  ["Who are you?", "A short prompt: watch its hand-off in the mesh.", {}],
  ["My locker code is 4821. Please remember it.", "Then ask for it: the second turn finds the first one cached.", {}],
  ["What is the weather in Oslo?", "With a tool: the model asks you to call it.", { tools: true }],
];
const TOOL = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city now",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer", minimum: 0 }, likes: { type: "array", items: { type: "string" }, maxItems: 3 } },
  required: ["name", "age", "likes"],
  additionalProperties: false,
};

const messages = [];
let running = null; // AbortController of the answer under way

export function start(modelName) {
  byId("ideas").append(...IDEAS.map(([text, why, options]) => element("li", {}, element("button", {
    type: "button",
    onclick: () => { if (options.tools) fillTools(); ask(text, modelName); },
  }, text, element("small", {}, why)))));
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else if (prompt.value.trim()) { ask(prompt.value.trim(), modelName); prompt.value = ""; grow(prompt); }
  });
  prompt.addEventListener("input", () => grow(prompt));
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) byId("composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  byId("tool-example").addEventListener("click", fillTools);
  byId("schema-example").addEventListener("click", () => { byId("schema").value = JSON.stringify(SCHEMA, null, 1); summarize(); });
  byId("settings").addEventListener("input", summarize);
  byId("clear").addEventListener("click", clear);
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function fillTools() {
  byId("tools").value = JSON.stringify(TOOL, null, 1);
  summarize();
}

function summarize() {
  const set = ["temperature", "top_p", "seed"].filter((id) => byId(id).value).map((id) => `${id} ${byId(id).value}`);
  if (byId("system").value.trim()) set.unshift("system prompt");
  if (byId("tools").value.trim()) set.push("tools");
  if (byId("schema").value.trim()) set.push("answer format");
  byId("summary").textContent = set.length ? `· ${set.join(" · ")}` : "";
}

function clear() {
  running?.abort();
  run(null);
  messages.length = 0;
  byId("talk").replaceChildren();
  byId("intro").hidden = false;
  complain("");
  byId("prompt").focus();
}

// The same button sends a message and stops the answer.
function run(controller) {
  running = controller;
  byId("send").textContent = controller ? "Stop" : "Send";
  byId("talk").setAttribute("aria-busy", String(Boolean(controller)));
}

function complain(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

// Throws a SyntaxError that names the field if its text is not JSON.
function json(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

function body(modelName) {
  const system = byId("system").value.trim();
  const fields = { model: modelName(), messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  for (const id of ["temperature", "top_p", "max_tokens", "seed"]) if (byId(id).value !== "") fields[id] = Number(byId(id).value);
  const tools = json("tools", "Tools");
  const schema = json("schema", "Answer format");
  if (tools) fields.tools = tools;
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return JSON.stringify({ ...fields, stream: true, stream_options: { include_draft_tokens: true } });
}

async function ask(text, modelName) {
  if (running) return;
  byId("intro").hidden = true;
  messages.push({ role: "user", content: text });
  const shown = say("user", "You");
  shown.text.textContent = text;
  if (await answer(modelName) || !shown.item.isConnected) return;
  // Nothing was answered: put the question back so that it can be sent again.
  shown.item.remove();
  byId("intro").hidden = messages.length > 0;
  const prompt = byId("prompt");
  prompt.value ||= text;
  grow(prompt);
}

function say(kind, who) {
  const text = element("div", { class: "text" });
  const item = element("li", { class: kind }, element("p", { class: "who" }, who), text);
  byId("talk").append(item);
  follow(true);
  return { item, text };
}

function follow(always) {
  const scroll = byId("scroll");
  if (always || scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 160) scroll.scrollTop = scroll.scrollHeight;
}

// Returns whether anything was answered; otherwise removes the last question from the conversation.
async function answer(modelName) {
  let payload;
  try {
    payload = body(modelName);
  } catch (error) {
    messages.pop();
    complain(error.message);
    return false;
  }
  complain("");
  const mine = new AbortController();
  run(mine);
  const shown = say("assistant running", modelName());
  const told = { content: new DraftedText(), reasoning: new DraftedText(), calls: [], timeline: null, ended: null };
  let isDue = false; // Draw once per frame, however many chunks arrive in it.
  const draw = () => {
    if (!isDue) requestAnimationFrame(() => { isDue = false; show(shown, told); });
    isDue = true;
  };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", body: payload, signal: mine.signal,
      headers: headers({ "content-type": "application/json", "x-weft-timeline": "1" }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    let isWhole = false;
    for await (const { event, data } of events(response)) {
      if (data === "[DONE]") { isWhole = true; break; }
      take(told, event, JSON.parse(data));
      draw();
    }
    if (!isWhole) throw new Error("The connection closed before the answer was complete.");
  } catch (error) {
    if (error.name !== "AbortError") complain(why(error));
  }
  if (running === mine) run(null);
  // The conversation was cleared during the request.
  return shown.item.isConnected && finish(shown, told, modelName);
}

function take(told, event, frame) {
  if (frame.error) throw new Error(frame.error.message);
  if (event === "weft.timeline") { told.timeline = frame; return; }
  const { delta = {}, is_draft: isDraft } = frame.choices?.[0] ?? {};
  told.ended = frame.choices?.[0]?.finish_reason ?? told.ended;
  told.content.add(delta.content ?? "", isDraft);
  told.reasoning.add(delta.reasoning_content ?? "", isDraft);
  for (const piece of delta.tool_calls ?? []) {
    const call = (told.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}

function show({ item, text }, told) {
  text.classList.add("rich");
  // Keep unchanged blocks, so that selecting and copying text is not interrupted.
  const [old, blocks] = [[...text.children], render(told.content.text)];
  shade(blocks, told.content);
  let same = 0;
  while (same < old.length && same < blocks.length && old[same].isEqualNode(blocks[same])) same += 1;
  for (const block of old.slice(same)) block.remove();
  text.append(...blocks.slice(same));
  if (told.reasoning.text) {
    let box = item.querySelector(".thoughts");
    if (!box) text.before(box = element("details", { class: "thoughts" }, element("summary", {}, "Thoughts"), element("div", { class: "text" })));
    box.lastChild.replaceChildren(...told.reasoning.slice(0, told.reasoning.text.length));
  }
  follow(false);
}

function finish(shown, told, modelName) {
  shown.item.classList.remove("running");
  show(shown, told);
  const content = told.content.text;
  if (content) shown.item.firstChild.append(copier(() => content) ?? "");
  const calls = told.calls.filter(Boolean);
  if (content || calls.length || told.timeline) { // An answer without text counts.
    messages.push({ role: "assistant", content: content || (calls.length ? null : ""), ...(calls.length ? { tool_calls: calls } : {}) });
  } else {
    messages.pop();
    shown.item.remove();
    return false;
  }
  if (told.ended === "length") shown.item.append(element("p", { class: "note" }, "Cut off at the length set under Settings, Longest answer."));
  const open = new Set(calls);
  for (const call of calls) shown.item.append(request(call, open, modelName));
  if (told.timeline) {
    shown.item.append(account(told.timeline));
    if (shown.item.querySelector(".draft")) shown.item.lastChild.append(legend());
    fit(shown.item);
  }
  follow(false);
  return true;
}

// A tool call with a field for its result. The request continues when all results are in.
function request(call, open, modelName) {
  const result = element("input", { placeholder: "Result of the tool", "aria-label": `Result of ${call.function.name}` });
  const form = element("form", { class: "reply" }, result, element("button", { type: "submit" }, "Reply"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running || !result.value.trim()) return;
    messages.push({ role: "tool", tool_call_id: call.id, content: result.value.trim() });
    const given = element("div", { class: "quiet" }, `→ ${result.value.trim()}`);
    form.replaceWith(given);
    byId("prompt").focus();
    open.delete(call);
    if (open.size || await answer(modelName)) return;
    open.add(call); // The request failed: the result can be sent again.
    given.replaceWith(form);
  });
  return element("div", { class: "call" }, element("code", {}, `${call.function.name}(${call.function.arguments})`), form);
}
