/** Server-sent events of a response. */

/**
 * @param {Response} response
 * @yields {{event: string, data: string}} Comments are left out.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (buffered + value).split("\n\n");
      buffered = blocks.pop();
      for (const block of blocks) {
        const found = parsed(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const found = { event: "message", data: null };
  for (const line of block.split("\n")) {
    const [, field, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (field === "event") found.event = value;
    if (field === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
  }
  return found.data === null ? null : found;
}
