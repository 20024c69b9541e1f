// Requests to this server, with the API key if required.

import { askForKey, storedKey } from "./key.js";

/** A failed request, with the server's message and advice. */
export class RequestError extends Error {
  constructor(message, status, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

const HINTS = {
  0: "Check that the server is running and that this machine reaches it.",
  401: "Enter a valid API key in the settings.",
  404: "Choose another model at the top.",
  413: "Send smaller or fewer images.",
  429: "Wait for running requests to end, then try again.",
  503: "The server is starting, stopping or full. Try again in a moment.",
};

/** fetch() with the key; asks for a key if it is missing or wrong. Throws a RequestError with the server's message. */
export async function call(path, { silent = false, ...options } = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError("The server does not answer.", 0, HINTS[0]);
    }
    if (response.status === 401 && !silent && await askForKey({ refused: Boolean(key) })) continue;
    if (!response.ok) throw new RequestError(await reasonOf(response), response.status, HINTS[response.status]);
    return response;
  }
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    const document = JSON.parse(text);
    return document.error?.message ?? document.message ?? text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}
