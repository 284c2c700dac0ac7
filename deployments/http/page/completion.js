/** One answer of the model, as it streams. */

import { fromBody, lost, request } from "./api.js";
import { events } from "./sse.js";

/** @returns {object} An answer without text, in the form of a message. */
export function newAnswer() {
  return { role: "assistant", text: "", reasoning: "", calls: [], figures: null, requestId: null, error: null };
}

/**
 * Ask for an answer and fill it while it streams.
 * @param {object} answer From newAnswer.
 * @param {object} body A chat completion's body, without the fields of streaming.
 * @param {AbortSignal} signal Aborts the answer: the server frees its row when the connection closes.
 * @param {() => void} onChange Called when something has been added.
 * @throws {ApiError|DOMException} The answer keeps what it has.
 */
export async function complete(answer, body, signal, onChange) {
  const clock = { asked: performance.now(), first: null, last: null };
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: sent, signal });
  answer.requestId = response.headers.get("X-Request-ID");
  answer.ignored = response.headers.get("X-Orchard-Ignored");
  try {
    for await (const { data } of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw fromBody(chunk.error, { requestId: answer.requestId });
      if (add(answer, chunk)) {
        clock.last = performance.now();
        clock.first ??= clock.last;
      }
      if (chunk.usage) answer.figures = figures(chunk.usage, clock);
      onChange();
    }
  } catch (error) {
    throw lost(error);
  }
  throw lost(new Error("The stream has ended too early."));
}

function add(answer, { choices }) {
  const { delta, finish_reason: finish } = choices[0] ?? { delta: {} };
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    answer.calls[index] ??= { id, name: called.name, arguments: "" };
    answer.calls[index].arguments += called.arguments;
  }
  if (finish) answer.finish = finish;
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

function figures(usage, { asked, first, last }) {
  const { prompt_tokens_details: prompt = {}, completion_tokens_details: completion = {} } = usage;
  return {
    prompt: usage.prompt_tokens,
    cached: prompt.cached_tokens ?? 0,
    skipped: prompt.specprefill?.skipped_tokens ?? 0,
    tokens: usage.completion_tokens,
    reasoning: completion.reasoning_tokens ?? 0,
    drafted: completion.drafted_tokens ?? 0,
    accepted: completion.accepted_draft_tokens ?? 0,
    firstS: first === null ? null : (first - asked) / 1000,
    decodeS: first === null ? null : (last - first) / 1000,
  };
}
