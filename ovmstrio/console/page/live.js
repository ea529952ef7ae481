// Server state, updated by one event stream, which is reopened whenever it ends.

import { ask, get, problemOf, readEvents, Refused } from "./api.js";
import { history } from "./history.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;
const LINES = 500;
const FAILURES = 100;
const TRACES = 1000;

// Objects without a prototype: any service name is a safe key.
const keyed = (given) => Object.assign(Object.create(null), given);

export const state = {
  link: "connecting",
  problem: "",
  server: null,
  rows: keyed(),
  services: keyed(),
  totals: null,
  history: history(),
  failures: [],
  groups: [],
  lines: [],
  traces: [],
  nodes: null,
};

const listeners = new Set();
let subscription = "";
let running = null;
let started = false;

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function notifyListeners(what) {
  for (const listener of [...listeners]) listener(what);
}

// Sets the data that the view needs; reopens the stream if it changed.
export function want(wanted) {
  const query = new URLSearchParams(wanted).toString();
  if (query === subscription && started) return;
  subscription = query;
  state.nodes = null;
  if (running) running.abort();
  if (!started) {
    started = true;
    run();
  }
}

export function reconnect() {
  if (running) running.abort();
}

async function run() {
  let pause = FIRST_PAUSE;
  for (;;) {
    running = new AbortController();
    try {
      if (!state.server || state.link !== "live") {
        await askServer();
      }
      const answer = await ask("/console/api/live" + (subscription ? "?" + subscription : ""), { signal: running.signal });
      if (!answer.ok) throw new Refused(answer.status, await problemOf(answer));
      pause = FIRST_PAUSE;
      // A new stream starts with all kept entries.
      state.failures = [];
      state.groups = [];
      state.lines = [];
      await readEvents(answer, take);
      setLink("lost", "the server closed the stream");
    } catch (error) {
      if (running.signal.aborted) continue;
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        setLink(error.status === 401 ? "unknown" : "refused", error.message);
        await new Promise((resume) => { state.retry = resume; });
        continue;
      }
      setLink("lost", error.message || "the server is not responding");
    }
    await new Promise((resume) => setTimeout(resume, pause));
    pause = Math.min(pause * 1.6, LONGEST_PAUSE);
  }
}

// Fetches the server document, which other clients may have changed.
export async function askServer() {
  state.server = await get("/console/api/server");
  notifyListeners("server");
}

// Fetches the last hour, which fills what this page has not seen.
async function fetchSeries() {
  try {
    state.history.merge(await get("/console/api/series"));
    notifyListeners("figures");
  } catch { /* The stream reports problems of the server. */ }
}

export function retry() {
  if (state.retry) state.retry();
}

function setLink(link, problem) {
  state.link = link;
  state.problem = problem || "";
  notifyListeners("link");
}

function take(name, text) {
  const data = JSON.parse(text);
  if (name === "whole") {
    state.rows = keyed(data.rows);
    state.services = keyed(data.services);
    state.totals = data.totals;
    state.history.add(data.totals);
    fetchSeries();
    setLink("live");
    notifyListeners("rows");
    notifyListeners("figures");
  } else if (name === "frame") {
    state.totals = data.totals;
    state.history.add(data.totals);
    Object.assign(state.services, data.services || {});
    if (data.rows) {
      for (const [key, row] of Object.entries(data.rows)) {
        if (row) state.rows[key] = row;
        else delete state.rows[key];
      }
      notifyListeners("rows");
    }
    notifyListeners("figures");
  } else if (name === "nodes") {
    state.nodes = { ...data, at: performance.now() };
    notifyListeners("nodes");
  } else if (name === "failures") {
    state.failures = state.failures.concat(data).slice(-FAILURES);
  } else if (name === "failure_groups") {
    state.groups = data;
    notifyListeners("failures");
  } else if (name === "log") {
    state.lines = state.lines.concat(data).slice(-LINES);
    notifyListeners("log");
  } else if (name === "traces") {
    const known = new Map(state.traces.map((trace) => [trace.trace_id, trace]));
    for (const trace of data) known.set(trace.trace_id, trace);
    state.traces = [...known.values()].sort((a, b) => (BigInt(a.began) < BigInt(b.began) ? 1 : -1)).slice(0, TRACES);
    notifyListeners("traces");
  } else if (name === "end" || name === "error") {
    setLink("lost", data.reason || data.error);
  }
}
