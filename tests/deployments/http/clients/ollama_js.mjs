// Runs the ollama package of npm against a server and prints what it got as JSON. Arguments: package folder, URL, image.
import { pathToFileURL } from "node:url";
import { join } from "node:path";
import { createRequire } from "node:module";

const [folder, host, image] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const { Ollama } = await import(pathToFileURL(require.resolve("ollama")).href);
const ollama = new Ollama({ host });
const model = "demo";
const user = (content, more = {}) => ({ role: "user", content, ...more });
const found = {};

async function streamed(messages, more = {}) {
  const parts = [];
  for await (const part of await ollama.chat({ model, messages, stream: true, ...more })) parts.push(part);
  const last = parts.at(-1);
  return {
    content: parts.map((part) => part.message.content).join(""),
    thinking: parts.map((part) => part.message.thinking ?? "").join(""),
    calls: parts.flatMap((part) => part.message.tool_calls ?? []).map((call) => call.function),
    done_reason: last.done_reason,
    eval_count: last.eval_count,
  };
}

async function refused(ask) {
  try {
    await ask();
    return null;
  } catch (error) {
    return { status: error.status_code ?? null, error: error.error ?? error.message };
  }
}

found.capital = await streamed([user("What is the capital of France?")], { think: true });
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather for a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
found.weather = await streamed([user("What is the weather in Paris?")], { tools, think: false });
found.whole = (await ollama.chat({ model, messages: [user("What is the capital of France?")], think: false })).message;
found.image = (await ollama.chat({ model, messages: [user("What is in the image?", { images: [image] })] })).message;
found.generate = (await ollama.generate({ model, prompt: "Once upon a time", raw: true })).response;
found.embed = (await ollama.embed({ model, input: ["a", "b"] })).embeddings;
found.models = (await ollama.list()).models.map((one) => one.model);
found.running = (await ollama.ps()).models.map((one) => one.model);
found.capabilities = (await ollama.show({ model })).capabilities;
found.version = (await ollama.version()).version;
found.missing = await refused(() => ollama.chat({ model: "llama3.2", messages: [user("Hi")] }));
found.pull = await refused(() => ollama.pull({ model: "llama3.2" }));
console.log(JSON.stringify(found));
