// Server-sent events over fetch, which can send a body and an API key; EventSource cannot.

const key = () => document.getElementById("key").value.trim();

export function headers(extra = {}) {
  return key() ? { authorization: `Bearer ${key()}`, ...extra } : extra;
}

// The error message of the API.
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

// Browsers report a failed connection as "Failed to fetch" and the like.
export const why = (error) =>
  error instanceof TypeError ? `The gateway cannot be reached: is the mesh running? (${error.message})` : error.message;

// Yields {event, data} until the stream ends; skips comments.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split(/\r?\n\r?\n/);
      rest = frames.pop();
      for (const frame of frames) {
        const fields = parse(frame);
        if (fields.data) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(frame) {
  const fields = { event: "message", data: "" };
  for (const line of frame.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") fields.event = value;
    if (name === "data") fields.data += fields.data ? `\n${value}` : value;
  }
  return fields;
}
