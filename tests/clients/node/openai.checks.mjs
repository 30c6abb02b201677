// The official TypeScript SDK against a gateway whose model repeats what it is told last; run by ../test_node.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.WEFT_MODEL_NAME;
const baseURL = `${process.env.WEFT_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey: process.env.WEFT_KEY, maxRetries: 0, timeout: 20_000 });
const Place = z.object({ city: z.string() });
const TOOLS = [
  {
    type: "function",
    function: {
      name: "now",
      description: "The time.",
      parameters: { type: "object", properties: { zone: { type: "string" } } },
    },
  },
];
const CALLS =
  'Two.\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>' +
  '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>';

async function all(items, pick = (item) => item) {
  const collected = [];
  for await (const item of items) collected.push(pick(item));
  return collected;
}

const told = (content) => [{ role: "user", content }];
const ask = (content, fields = {}) => client.chat.completions.create({ model, messages: told(content), ...fields });
const askStreamed = (content, fields = {}) =>
  client.chat.completions.stream({ model, messages: told(content), stream_options: { include_usage: true }, ...fields });

test("a whole answer has text, reason and usage", async () => {
  const answer = await ask("hello world, naïve 🙂");
  assert.equal(answer.choices[0].message.content, "hello world, naïve 🙂");
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.prompt_tokens_details.cached_tokens, 8);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.match(answer._request_id, /^[A-Za-z0-9._-]+$/);
});

test("a stream joins to the same, with its usage", async () => {
  const whole = await ask("hello world, naïve 🙂");
  const stream = askStreamed("hello world, naïve 🙂");
  let words = "";
  stream.on("content", (delta) => (words += delta));
  const joined = await stream.finalChatCompletion();
  assert.equal(words, "hello world, naïve 🙂");
  assert.equal(joined.choices[0].message.content, words);
  assert.equal(joined.choices[0].finish_reason, "stop");
  const usage = await stream.totalUsage();
  for (const counted of ["prompt_tokens", "completion_tokens", "total_tokens"])
    assert.equal(usage[counted], whole.usage[counted], counted);
});

test("usage is null until the end, and only the last frame has no choices", async () => {
  const chunks = await all(
    await ask("hello", { stream: true, stream_options: { include_usage: true } }),
  );
  assert.deepEqual(chunks.slice(0, -1).filter((chunk) => chunk.usage !== null || chunk.choices.length !== 1), []);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.deepEqual(chunks.at(-1).usage, (await ask("hello")).usage);
});

test("an answer that is cut off says length", async () => {
  const answer = await ask("one two three four five six", { max_completion_tokens: 3 });
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 3);
});

for (const isStreamed of [false, true]) {
  test(`tools are called, ${isStreamed ? "streamed" : "whole"}`, async () => {
    const answer = isStreamed
      ? await askStreamed(CALLS, { tools: TOOLS }).finalChatCompletion()
      : await ask(CALLS, { tools: TOOLS });
    const { message, finish_reason } = answer.choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.content, "Two.");
    const called = message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
    assert.deepEqual(called, [["now", { zone: "utc" }], ["now", {}]]);
    assert.equal(new Set(message.tool_calls.map((call) => call.id)).size, 2);
  });
}

test("the SDK's own loop calls a tool and sends its result back", async () => {
  const asked = [];
  const tool = {
    type: "function",
    function: {
      name: "now",
      parameters: { type: "object", properties: { zone: { type: "string" } } },
      parse: JSON.parse,
      function: (args) => asked.push(args) && "noon",
    },
  };
  const words = '<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>';
  const runner = client.chat.completions.runTools({ model, messages: told(words), tools: [tool], stream: true });
  assert.equal(await runner.finalContent(), "noon");
  assert.deepEqual(asked, [{ zone: "utc" }]);
});

for (const isStreamed of [false, true]) {
  test(`structured output is parsed, ${isStreamed ? "streamed" : "whole"}`, async () => {
    const format = { response_format: zodResponseFormat(Place, "place") };
    const answer = isStreamed
      ? await askStreamed('{"city": "Rome"}', format).finalChatCompletion()
      : await client.chat.completions.parse({ model, messages: told('{"city": "Rome"}'), ...format });
    assert.deepEqual(answer.choices[0].message.parsed, { city: "Rome" });
  });
}

test("the Responses API, whole and streamed", async () => {
  const whole = await client.responses.create({ model, input: "hello world" });
  assert.equal(whole.output_text, "hello world");
  const stream = client.responses.stream({ model, input: "hello world" });
  const kinds = await all(stream, (event) => event.type);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  const final = await stream.finalResponse();
  assert.equal(final.output_text, "hello world");
  assert.equal(final.usage.total_tokens, whole.usage.total_tokens);
});

test("completions, embeddings and models", async () => {
  const answer = await client.completions.create({ model, prompt: "hello" });
  assert.equal(answer.choices[0].text, "hello");
  const { data } = await client.embeddings.create({ model, input: ["hello", "world"] }); // as base64, by default
  assert.deepEqual(data.map((each) => each.embedding.length), [3, 3]);
  assert.deepEqual((await all(client.models.list())).map((each) => each.id), [model]);
});

const REFUSED = [
  ["400", OpenAI.BadRequestError, (c) => c.chat.completions.create({ model, messages: told("x"), temperature: 9 })],
  ["401", OpenAI.AuthenticationError, (c) => c.withOptions({ apiKey: "wrong" }).models.list()],
  ["404", OpenAI.NotFoundError, (c) => c.chat.completions.create({ model: "other", messages: told("x") })],
  ["429", OpenAI.RateLimitError, (c) => c.chat.completions.create({ model, messages: told("fail 8") })],
  ["500", OpenAI.InternalServerError, (c) => c.chat.completions.create({ model, messages: told("fail 13"), stream: true })],
];
for (const [status, kind, call] of REFUSED) {
  test(`an error of status ${status} has its class, type and request id`, async () => {
    await assert.rejects(async () => await call(client), (error) => {
      assert.ok(error instanceof kind, String(error));
      assert.equal(String(error.status), status);
      assert.ok(error.type && error.requestID);
      return true;
    });
  });
}

test("what is refused for lack of room is tried again, no sooner than the gateway says", async () => {
  const started = Date.now();
  await assert.rejects(client.chat.completions.create({ model, messages: told("fail 8") }, { maxRetries: 1 }));
  assert.ok(Date.now() - started >= 900, "retry-after-ms is 1000");
});

test("a stream that fails on the way raises", async () => {
  const stream = await ask("Something goes wrong here: now", { stream: true });
  let words = "";
  await assert.rejects(async () => {
    for await (const chunk of stream) words += chunk.choices[0].delta.content ?? "";
  }, OpenAI.APIError);
  assert.equal(words, "Something goes wrong here: now");
});

test("a stream can be left", async () => {
  const stream = await ask("And so on", { stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
});

test("a whole answer that is waited for no longer is aborted", async () => {
  const controller = new AbortController();
  const waiting = client.chat.completions.create({ model, messages: told("And so on") }, { signal: controller.signal });
  setTimeout(() => controller.abort(), 200);
  await assert.rejects(waiting, OpenAI.APIUserAbortError);
});
