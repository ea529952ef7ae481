// Requests to the server, with the API key, which is kept for this tab only.

const KEY = "ovms-console-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; }
}

export function setKey(text) {
  try {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  } catch { /* Without storage the page asks again. */ }
}

function headersWith(given) {
  const headers = { ...(given || {}) };
  if (key()) headers.authorization = "Bearer " + key();
  return headers;
}

export function ask(path, options) {
  const given = options || {};
  return fetch(path, { ...given, headers: headersWith(given.headers), credentials: "same-origin", cache: "no-store" });
}

export async function problemOf(answer) {
  const text = await answer.text();
  try {
    const document = JSON.parse(text);
    const problem = document.error || document.detail || document.message || text;
    return typeof problem === "string" ? problem : problem.message || JSON.stringify(problem);
  } catch {
    return text || "status " + answer.status;
  }
}

export async function get(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Refused(answer.status, await problemOf(answer));
  return answer.json();
}

export async function change(path, body) {
  const answer = await ask(path, {
    method: "POST",
    headers: { "x-ovms-console": "1", "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Refused(answer.status, await problemOf(answer));
  return answer.json();
}

// Calls take(name, text) for each server-sent event of a response.
export async function readEvents(answer, take) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true }).replaceAll("\r\n", "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        let name = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        if (data.length) await take(name, data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
