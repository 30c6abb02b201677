// The TypeScript clients against a whole mesh, weft-nano as its model; run by ../test_whole_mesh.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.WEFT_MODEL_NAME;
const baseURL = `${process.env.WEFT_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey: process.env.WEFT_KEY, maxRetries: 0, timeout: 60_000 });
const weft = createOpenAICompatible({
  name: "weft",
  baseURL,
  apiKey: process.env.WEFT_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const prompt = "What is the weather in Oslo?";
const messages = [{ role: "user", content: prompt }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const Place = z.object({ city: z.enum(["Oslo", "Rome"]) }); // weft-nano finds no end to a text of its own
const common = { model: weft(model), maxRetries: 0, temperature: 0, maxOutputTokens: 200, prompt };

async function all(items, pick = (item) => item) {
  const collected = [];
  for await (const item of items) collected.push(pick(item));
  return collected;
}

test("openai: a stream joins to the whole answer, with its usage", async () => {
  const asked = { model, messages, temperature: 0, max_tokens: 24 };
  const whole = await client.chat.completions.create(asked);
  const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const joined = await stream.finalChatCompletion();
  assert.ok(whole.choices[0].message.content);
  assert.equal(joined.choices[0].message.content, whole.choices[0].message.content);
  const usage = await stream.totalUsage();
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

for (const isStreamed of [false, true]) {
  test(`openai: a forced call has its arguments, ${isStreamed ? "streamed" : "whole"}`, async () => {
    const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];
    const asked = { model, messages, tools, tool_choice: "required", max_tokens: 120, temperature: 0 };
    const answer = isStreamed
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "get_weather");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  });

  test(`openai: structured output is parsed, ${isStreamed ? "streamed" : "whole"}`, async () => {
    const asked = { model, messages, response_format: zodResponseFormat(Place, "place"), max_tokens: 300, temperature: 0 };
    const answer = isStreamed
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.parse(asked);
    assert.equal(typeof answer.choices[0].message.parsed.city, "string");
  });
}

test("openai: the Responses API, whole and streamed", async () => {
  const asked = { model, input: "Who are you?", temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  const stream = client.responses.stream(asked);
  const kinds = await all(stream, (event) => event.type);
  assert.equal(kinds[0], "response.created");
  assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
  const { id, output_text } = await stream.finalResponse();
  assert.equal(output_text, whole.output_text);
  const further = await client.responses.create({ ...asked, input: "Go on.", previous_response_id: id });
  assert.ok(further.usage.input_tokens > whole.usage.input_tokens);
  assert.equal((await client.responses.retrieve(further.id)).output_text, further.output_text);
});

test("openai: completions, embeddings, models and errors", async () => {
  assert.ok((await client.completions.create({ model, prompt: "The river", max_tokens: 8 })).choices[0].text);
  const { data } = await client.embeddings.create({ model, input: ["river", "town"] });
  assert.ok(data.length === 2 && data.every((each) => each.embedding.length > 100));
  assert.deepEqual((await all(client.models.list())).map((each) => each.id), [model]);
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
});

test("ai-sdk: a stream joins to the whole answer, with its usage", async () => {
  const whole = await generateText(common);
  const answer = streamText(common);
  assert.equal((await all(answer.textStream)).join(""), whole.text);
  assert.equal((await answer.usage).totalTokens, whole.usage.totalTokens);
});

test("ai-sdk: a tool is called in a stream, its arguments piece by piece", async () => {
  const asked = [];
  const get_weather = tool({ inputSchema: jsonSchema(parameters), execute: async (input) => asked.push(input) && "rain" });
  const answer = streamText({ ...common, tools: { get_weather }, toolChoice: "required" });
  const kinds = await all(answer.fullStream, (part) => part.type);
  assert.ok(kinds.includes("tool-input-delta"));
  assert.deepEqual(kinds.filter((kind) => kind === "error"), []);
  assert.equal(typeof asked[0].city, "string");
});

test("ai-sdk: structured output is parsed, whole and streamed", async () => {
  assert.equal(typeof (await generateObject({ ...common, schema: Place })).object.city, "string");
  const streamed = streamObject({ ...common, schema: Place });
  await all(streamed.partialObjectStream);
  assert.equal(typeof (await streamed.object).city, "string");
});

test("ai-sdk: embeddings", async () => {
  const { embeddings } = await embedMany({ model: weft.embeddingModel(model), values: ["river", "town"], maxRetries: 0 });
  assert.ok(embeddings.length === 2 && embeddings.every((each) => each.length > 100));
});
