/**
 * A conversation: what is kept, and what of it is sent.
 *
 * A message is {role: "user", text, files: [{kind, name, url}]},
 * {role: "assistant", text, reasoning, calls: [{id, name, arguments}], figures, requestId, error} or
 * {role: "tool", callId, name, text}.
 */

const MAX_TITLE = 48;

/** @returns {object} An empty conversation. */
export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (one) => one.toString(16).padStart(2, "0")).join("");
  return { id, title: "New conversation", updated: Date.now(), messages: [] };
}

/** @param {object} conversation @returns {string} The beginning of its first question. */
export function titleOf({ messages }) {
  const first = messages.find(({ role }) => role === "user");
  const text = (first?.text || first?.files[0]?.name || "New conversation").trim().replace(/\s+/g, " ");
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE)}…` : text;
}

/**
 * @param {object[]} messages
 * @param {string} system The system prompt, "" for none.
 * @returns {object[]} The messages of a chat completion; answers that have no text and no call are left out.
 */
export function wireMessages(messages, system) {
  const sent = messages.filter(({ role, text, calls }) => role !== "assistant" || text || calls?.length).map(wire);
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}

function wire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "user") return { role: "user", content: message.files.length ? parts(message) : message.text };
  const sent = { role: "assistant", content: message.text };
  if (message.reasoning) sent.reasoning_content = message.reasoning;
  if (message.calls.length) {
    sent.tool_calls = message.calls.map(({ id, name, arguments: given }) => (
      { id, type: "function", function: { name, arguments: given } }));
  }
  return sent;
}

function parts({ text, files }) {
  const media = files.map(({ kind, url }) => (
    kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } }));
  return text ? [...media, { type: "text", text }] : media;
}

/** @param {object} conversation @returns {string} Its texts in Markdown; of files only the names. */
export function toMarkdown({ title, messages }) {
  const told = messages.map((message) => {
    if (message.role === "tool") return `## Result of ${message.name}\n\n${message.text}`;
    if (message.role === "user") {
      const files = message.files.map(({ kind, name }) => `*${kind}: ${name}*\n\n`).join("");
      return `## You\n\n${files}${message.text}`;
    }
    const calls = message.calls.map(({ name, arguments: given }) => `\n\n\`${name}(${given})\``).join("");
    return `## Answer\n\n${message.text}${calls}`;
  });
  return `# ${title}\n\n${told.join("\n\n")}\n`;
}
