/** An error in words: what happened is the server's sentence; here is what the user can do. */

const IN_SETTINGS = ["temperature", "top_p", "seed", "max_tokens", "reasoning_effort", "tools", "model"];

/**
 * @param {import("./api.js").ApiError} error
 * @returns {{text: string, opensSettings?: boolean, canRetry?: boolean}}
 */
export function advice(error) {
  const { status, code, param } = error;
  if (status === 0) return { text: "Check that it runs and can be reached, then try again.", canRetry: true };
  if (status === 401) return { text: "Enter an API key in the settings.", opensSettings: true, canRetry: true };
  if (status === 429 || status === 503 || error.retryAfter !== null) return { text: "", canRetry: true };
  if (status === 413) return { text: "Attach fewer or smaller files, or start a new conversation." };
  if (code === "context_length_exceeded") {
    return { text: "Start a new conversation, shorten the message, or allow fewer tokens for the answer." };
  }
  if (status === 400 && IN_SETTINGS.includes(String(param).split(/[.[]/)[0])) {
    return { text: "Change it in the settings.", opensSettings: true, canRetry: true };
  }
  if (status >= 500) {
    const named = error.requestId ? ` Its log has more under ${error.requestId}.` : "";
    return { text: `This is a fault of the server.${named}`, canRetry: true };
  }
  return { text: "" };
}
