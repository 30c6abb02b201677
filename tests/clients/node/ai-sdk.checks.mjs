// Vercel's AI SDK by @ai-sdk/openai-compatible, against a gateway whose model repeats what it is told last.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const name = process.env.WEFT_MODEL_NAME;
const provider = (apiKey) =>
  createOpenAICompatible({
    name: "weft",
    baseURL: `${process.env.WEFT_URL}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const weft = provider(process.env.WEFT_KEY);
const model = weft(name);
const common = { model, maxRetries: 0 };
const schema = z.object({ city: z.string() });
const CALL = 'One.\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>';
const now = (asked) =>
  tool({
    description: "The time.",
    inputSchema: z.object({ zone: z.string() }),
    execute: async (input) => asked.push(input) && "noon",
  });

async function all(items, pick = (item) => item) {
  const collected = [];
  for await (const item of items) collected.push(pick(item));
  return collected;
}

test("a whole answer has text, reason and usage", async () => {
  const answer = await generateText({ ...common, prompt: "hello world, naïve 🙂" });
  assert.equal(answer.text, "hello world, naïve 🙂");
  assert.equal(answer.finishReason, "stop");
  assert.equal(answer.usage.cachedInputTokens, 8);
  assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
});

test("a stream joins to the same, with its usage", async () => {
  const whole = await generateText({ ...common, prompt: "hello world, naïve 🙂" });
  const answer = streamText({ ...common, prompt: "hello world, naïve 🙂" });
  const pieces = await all(answer.textStream);
  assert.equal(pieces.join(""), "hello world, naïve 🙂");
  assert.equal(await answer.finishReason, "stop");
  const usage = await answer.usage;
  for (const counted of ["inputTokens", "outputTokens", "totalTokens", "cachedInputTokens"])
    assert.equal(usage[counted], whole.usage[counted], counted);
});

test("an answer that is cut off says length", async () => {
  const answer = await generateText({ ...common, prompt: "one two three four five six", maxOutputTokens: 3 });
  assert.equal(answer.finishReason, "length");
});

test("a tool is called, and its result goes back", async () => {
  const asked = [];
  const answer = await generateText({ ...common, prompt: CALL, tools: { now: now(asked) }, stopWhen: stepCountIs(2) });
  assert.deepEqual(answer.steps.map((step) => [step.finishReason, step.text]), [["tool-calls", "One."], ["stop", "noon"]]);
  assert.deepEqual(asked, [{ zone: "utc" }]);
});

test("a tool is called in a stream, its arguments piece by piece", async () => {
  const asked = [];
  const answer = streamText({ ...common, prompt: CALL, tools: { now: now(asked) }, stopWhen: stepCountIs(2) });
  const kinds = await all(answer.fullStream, (part) => part.type);
  assert.ok(kinds.includes("tool-input-delta"));
  assert.deepEqual(kinds.filter((kind) => kind === "error"), []);
  assert.deepEqual((await answer.steps).map((step) => step.text), ["One.", "noon"]);
  assert.deepEqual(asked, [{ zone: "utc" }]);
});

test("structured output is parsed, whole and streamed", async () => {
  const prompt = '{"city": "Rome"}';
  assert.deepEqual((await generateObject({ ...common, schema, prompt })).object, { city: "Rome" });
  const streamed = streamObject({ ...common, schema, prompt });
  assert.deepEqual((await all(streamed.partialObjectStream)).at(-1), { city: "Rome" });
  assert.deepEqual(await streamed.object, { city: "Rome" });
});

test("embeddings have their length", async () => {
  const { embeddings } = await embedMany({ model: weft.embeddingModel(name), values: ["hello", "world"], maxRetries: 0 });
  assert.deepEqual(embeddings.map((each) => each.length), [3, 3]);
});

const REFUSED = [
  [400, () => generateText({ ...common, prompt: "x", temperature: 9 })],
  [401, () => generateText({ ...common, model: provider("wrong")(name), prompt: "x" })],
  [404, () => generateText({ ...common, model: weft("other"), prompt: "x" })],
  [429, () => generateText({ ...common, prompt: "fail 8" })],
  [500, () => generateText({ ...common, prompt: "fail 13" })],
];
for (const [status, call] of REFUSED) {
  test(`an error of status ${status} says what it is, and whether to try again`, async () => {
    await assert.rejects(call, (error) => {
      assert.equal(error.statusCode, status, String(error));
      assert.equal(error.isRetryable, status === 429 || status >= 500);
      assert.ok(error.data.error.message);
      return true;
    });
  });
}

test("a stream that fails on the way says so", async () => {
  const answer = streamText({ ...common, prompt: "Something goes wrong here: now", onError: () => {} });
  const parts = await all(answer.fullStream);
  const words = parts.filter((part) => part.type === "text-delta").map((part) => part.text);
  assert.equal(words.join(""), "Something goes wrong here: now");
  assert.equal(parts.filter((part) => part.type === "error").length, 1);
});

test("a stream can be left", async () => {
  const controller = new AbortController();
  const answer = streamText({ ...common, prompt: "And so on", abortSignal: controller.signal });
  const kinds = [];
  for await (const part of answer.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta") controller.abort();
  }
  assert.equal(kinds.at(-1), "abort");
});
