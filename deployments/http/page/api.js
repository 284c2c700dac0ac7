/** Requests to the server's API. Paths are relative to the page, so that it works behind a path prefix. */

import { apiKey } from "./settings.js";

/** A request that was refused or failed. `status` is 0 if the server did not answer. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string|null, param?: string|null, retryAfter?: number|null,
   *          requestId?: string|null}} [facts] retryAfter: seconds until the same request may succeed.
   */
  constructor(message, { status = 0, code = null, param = null, retryAfter = null, requestId = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter, requestId });
  }
}

/**
 * @param {string} path Without a slash in front: "v1/models".
 * @param {{body?: object, signal?: AbortSignal}} [options] With a body it is a POST.
 * @returns {Promise<Response>} A response without an error.
 * @throws {ApiError|DOMException} The latter if the signal aborts it.
 */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  const sent = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  let response;
  try {
    response = await fetch(path, body ? { ...sent, body: JSON.stringify(body) } : sent);
  } catch (error) {
    throw lost(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** @param {string} path @returns {Promise<any>} The JSON body of a GET. @throws {ApiError} */
export const getJson = async (path) => (await request(path)).json();

/**
 * @param {Error} error From fetch or from reading a body.
 * @returns {Error} An ApiError, or the error itself if the request was aborted.
 */
export function lost(error) {
  if (error instanceof ApiError || error.name === "AbortError") return error;
  return new ApiError("The server does not answer.");
}

/**
 * @param {object} error The object `error` of a body or of an event.
 * @param {object} [facts] What the response has told otherwise.
 * @returns {ApiError}
 */
export function fromBody(error, facts = {}) {
  const { code, param, retry_after_s: retryAfter = null } = error;
  return new ApiError(error.message, { status: 500, retryAfter, ...facts, code, param });
}

async function refusal(response) {
  const wait = response.headers.get("Retry-After");
  const facts = {
    status: response.status,
    retryAfter: wait === null ? null : Number(wait),
    requestId: response.headers.get("X-Request-ID"),
  };
  try {
    return fromBody((await response.json()).error, facts);
  } catch {
    return new ApiError(`The server answered with the status ${response.status}.`, facts);
  }
}
