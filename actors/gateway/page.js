// The page at `/`: keeps the table and the load fresh, and talks to the model.
// Text of the server or the model is only ever set as text. Nothing is asked while the page is hidden.
"use strict";

const PERIOD_MS = 2000;
const RATE = "histrio_generated_tokens_total";
const at = (id) => document.getElementById(id);
let before = null; // { ms, tokens } of the last reading

function series(text, name) {
  let sum = 0;
  for (const line of text.split("\n"))
    if (line.startsWith(name + " ") || line.startsWith(name + "{"))
      sum += Number(line.slice(line.lastIndexOf(" ") + 1));
  return sum;
}

async function refresh() {
  if (document.hidden) return;
  try {
    const [actors, metrics, ready] = await Promise.all(
      ["/actors", "/metrics", "/ready"].map((path) => fetch(path)));
    showActors(await actors.json());
    showLoad(await metrics.text(), ready.ok);
  } catch {
    at("load").textContent = "The server does not answer.";
    before = null;
  }
}

const ms = (seconds) => seconds == null ? "" : `${(seconds * 1000).toFixed(2)} ms`;

function showActors(rows) {
  at("actors").replaceChildren(...rows.map((row) => {
    const busy = row.busy_with ? `${row.busy_with} for ${row.busy_s.toFixed(1)} s` : "";
    const doing = row.age_s >= 1 ? `${busy} (${row.age_s.toFixed(0)} s ago)` : busy;
    const line = document.createElement("tr");
    for (const value of [row.path, row.state, row.node, row.pid, row.incarnation, row.restarts,
                         row.mailbox_depth, ms(row.handle_p50_s), ms(row.handle_p99_s), doing])
      line.appendChild(document.createElement("td")).textContent = value;
    return line;
  }));
}

function showLoad(text, isReady) {
  const now = { ms: performance.now(), tokens: series(text, RATE) };
  const parts = [isReady ? "ready" : "not ready",
                 `${series(text, "histrio_requests_running")} running`,
                 `${series(text, "histrio_requests_waiting")} waiting`];
  if (before) {
    const rate = (now.tokens - before.tokens) / (now.ms - before.ms) * 1000;
    parts.push(`${Math.max(0, rate).toFixed(0)} tokens/s`);
  }
  before = now;
  at("load").textContent = parts.join(", ");
}

const messages = []; // the conversation so far
let running = null; // the AbortController of the answer that is being written

function say(who, text) {
  const line = at("talk").appendChild(document.createElement("p"));
  line.className = who;
  line.textContent = text;
  line.scrollIntoView({ block: "nearest" });
  return line;
}

async function* deltas(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk.choices[0]?.delta?.content ?? "";
    }
  }
}

async function answer(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  const line = say("assistant", "");
  running = new AbortController();
  at("send").textContent = "Stop";
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: at("chat").dataset.model, messages, stream: true }),
      signal: running.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const piece of deltas(reply)) {
      line.append(piece);
      line.scrollIntoView({ block: "nearest" });
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  if (line.textContent) messages.push({ role: "assistant", content: line.textContent });
  else messages.pop();
  running = null;
  at("send").textContent = "Send";
}

at("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = at("prompt").value.trim();
  if (!text) return;
  at("prompt").value = "";
  answer(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) at("chat").requestSubmit();
  }
});
at("chat").hidden = false;
setInterval(refresh, PERIOD_MS);
document.addEventListener("visibilitychange", refresh);
