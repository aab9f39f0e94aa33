// Vercel's `ai` with `@ai-sdk/openai-compatible`: the same steps as those of Python's packages (scenario.py).

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const here = createRequire(process.env.PENSTOCK_NODE_MODULES + "/");
const load = async (name) => import(pathToFileURL(here.resolve(name)).href);
const { APICallError, generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const URL_ = process.env.PENSTOCK_URL;
const MODEL = "scripted";
const EXPECTED = JSON.parse(readFileSync(new URL("./expected.json", import.meta.url)));
const FREE_WITHIN_MS = 20_000;

const modelAt = (url, name = MODEL) =>
  createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true })(name);
const model = modelAt(URL_);

function check(holds, told) {
  if (!holds) throw new Error(told);
}

function same(one, other) {
  check(JSON.stringify(one) === JSON.stringify(other), `${JSON.stringify(one)} is not ${JSON.stringify(other)}`);
}

function town() {
  const calls = [];
  const tools = {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        calls.push({ name: "get_weather", arguments: { city } });
        return EXPECTED.weather[city];
      },
    }),
    get_time: tool({
      description: "The time in a city.",
      inputSchema: z.object({ city: z.string(), format: z.enum(["12h", "24h"]) }),
      execute: async ({ city, format }) => {
        calls.push({ name: "get_time", arguments: { city, format } });
        return EXPECTED.time[city];
      },
    }),
  };
  const checkAnswer = (answer) => {
    const byText = (a, b) => (JSON.stringify(a) < JSON.stringify(b) ? -1 : 1);
    same([...calls].sort(byText), [...EXPECTED.calls].sort(byText));
    for (const result of [...Object.values(EXPECTED.weather), ...Object.values(EXPECTED.time)])
      check(answer.includes(result), `${result} is not in: ${answer}`);
  };
  return { tools, checkAnswer };
}

async function chat() {
  const { text, reasoningText, usage } = await generateText({ model, prompt: "Hello", maxRetries: 0 });
  same(text, EXPECTED.greeting);
  same(reasoningText, EXPECTED.greeting_reasoning);
  check(usage.outputTokens > 0, "no usage");
}

async function stream() {
  const pieces = [];
  for await (const piece of streamText({ model, prompt: "Hello", maxRetries: 0 }).textStream) pieces.push(piece);
  check(pieces.length > 1, `not streamed: ${pieces}`);
  same(pieces.join(""), EXPECTED.greeting);
}

async function tools() {
  const here_ = town();
  const asked = { model, prompt: EXPECTED.weather_question, tools: here_.tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  here_.checkAnswer((await generateText(asked)).text);
}

async function streamed_tools() {
  const here_ = town();
  const asked = { model, prompt: EXPECTED.weather_question, tools: here_.tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  here_.checkAnswer(await streamText(asked).text);
}

async function structured() {
  const schema = z.object({ name: z.string(), born: z.number().int(), languages: z.array(z.string()) });
  const { object } = await generateObject({ model, schema, prompt: EXPECTED.ada_question, maxRetries: 0 });
  same(object, EXPECTED.ada);
}

async function error() {
  try {
    await generateText({ model: modelAt(URL_, "nobody"), prompt: "Hello", maxRetries: 0 });
  } catch (refused) {
    check(APICallError.isInstance(refused), String(refused));
    same(refused.statusCode, 404);
    check(refused.message.includes("nobody"), refused.message);
    return;
  }
  throw new Error("a model that there is not was found");
}

async function retry() {
  const patient = modelAt(`${process.env.PENSTOCK_FLAKY_URL}/ai`);
  same((await generateText({ model: patient, prompt: "Hello", maxRetries: 3 })).text, EXPECTED.greeting);
}

async function aborted() {
  const lines = (await (await fetch(`${URL_}/metrics`)).text()).split("\n");
  const own = lines.filter((line) => line.includes('request_success_total{finished_reason="abort"'));
  return own.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

async function cancel() {
  const before = await aborted();
  const leaving = new AbortController();
  const asked = { model, prompt: EXPECTED.endless_question, maxRetries: 0, abortSignal: leaving.signal, onError() {} };
  let text = "";
  for await (const piece of streamText(asked).textStream) {
    text += piece;
    if (text.length > 20) break;
  }
  leaving.abort();
  check(text.startsWith(EXPECTED.endless_begins), text);
  const until = Date.now() + FREE_WITHIN_MS;
  for (;;) {
    const { workers } = await (await fetch(`${URL_}/admin/workers`)).json();
    const held = workers.some((row) => row.running || row.queued || row.kv_pages_used);
    if (!held && (await aborted()) === before + 1) return;
    check(Date.now() < until, `still there: ${JSON.stringify(workers)}`);
    await new Promise((done) => setTimeout(done, 20));
  }
}

for (const step of [chat, stream, tools, streamed_tools, structured, error, retry, cancel]) {
  const began = Date.now();
  let told = {};
  try {
    await step();
  } catch (wrong) {
    told = { error: String(wrong.stack ?? wrong) };
  }
  console.log(JSON.stringify({ step: step.name, seconds: (Date.now() - began) / 1000, ...told }));
}
