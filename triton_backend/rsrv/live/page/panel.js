// A model's panel: its figures, what happened to it, and actions for clients with the token.
import { $, bytes, make, say } from "./base.js";
import { now, outside, servers } from "./servers.js";

let shown = null; // the row whose panel is open

/** Return what a model's weights take: its own, and what it shares with others. */
function weights(row) {
  const memory = Object.values(servers.get(row.server)?.memory ?? {}).find((one) => row.name in one.models);
  if (!memory) return bytes(row.bytes);
  const groups = memory.groups.filter(([, names]) => names.includes(row.name));
  const shared = groups.reduce((sum, [size]) => sum + size, 0);
  const others = [...new Set(groups.flatMap(([, names]) => names))].filter((name) => name !== row.name);
  const own = `${bytes(memory.models[row.name])} own`;
  return shared ? `${own}, ${bytes(shared)} shared with ${others.slice(0, 5).join(", ")}${others.length > 5 ? ` and ${others.length - 5} more` : ""}` : own;
}

export async function openPanel(row, writable, log) {
  shown = row;
  $("panel").hidden = false;
  say($("panel-title"), row.name);
  $("panel").focus();
  $("actions").replaceChildren(...(writable && row.state !== "cold" ? ["pin", "unpin", "prefetch", "evict"].map((what) => action(what, row, log)) : []));
  const query = new URLSearchParams({ server: row.server, model: row.name });
  let found = {};
  try {
    const answer = await fetch(`live/model?${query}`);
    found = answer.ok ? await answer.json() : { history: [await answer.text()] };
  } catch (error) {
    found = { history: [String(error)] };
  }
  if (shown !== row) return;
  const facts = [["state", row.weights], ["weights", weights(row)], ...(found.facts ?? []), ...(row.error ? [["error", row.error]] : [])];
  $("panel-parts").replaceChildren(
    make("dl", { className: "facts" }, ...facts.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })])),
    ...table(["shape", "size", "executions", "cost"], found.executables ?? []),
    ...part("Slowest requests of the last hour", found.slowest ?? []),
    ...request(row, found.inputs ?? []),
  );
  $("history-lines").replaceChildren(...(found.history ?? []).reverse().map((text) => make("li", { textContent: text })));
}

const part = (title, lines) => (lines.length ? [make("h3", { textContent: title }), make("ol", { className: "lines" }, ...lines.reverse().map((text) => make("li", { textContent: text })))] : []);

function table(titles, lines) {
  if (!lines.length) return [];
  const head = make("tr", {}, ...titles.map((text) => make("th", { className: "number", scope: "col", textContent: text })));
  const body = lines.map((line) => make("tr", {}, ...line.map((text) => make("td", { className: "number", textContent: text }))));
  return [make("h3", { textContent: "Compiled" }), make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))];
}

/** The command of one request with zeros: one row, and 1 for each size that is free. */
function request(row, inputs) {
  const http = servers.get(row.server)?.facts?.endpoints.HTTP;
  if (!inputs.length || !http) return [];
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  let word = "", text = ""; // of the shell, and the JSON that is not quoted yet
  inputs.forEach(({ name, datatype, shape }, at) => {
    const sizes = shape.map((size) => Math.max(1, Number(size))), count = sizes.reduce((product, size) => product * size, 1);
    const zero = { BYTES: '"text"', BOOL: "false" }[datatype] ?? "0";
    text += `${at ? "," : ""}{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":${JSON.stringify(sizes)},"data":[`;
    if (count <= 32) text += Array(count).fill(zero).join();
    else {
      word += `${quoted(text)}"$(yes ${quoted(zero)} | head -n ${count} | paste -sd, -)"`;
      text = "";
    }
    text += "]}";
  });
  const url = `http://${outside(http)}/v2/models/${encodeURIComponent(row.name)}/infer`;
  const command = `printf %s ${quoted('{"inputs":[').slice(0, -1)}${(word + quoted(`${text}]}`)).slice(1)} | curl -s ${quoted(url)} -d @-`;
  const copy = make("button", { type: "button", textContent: "copy" }), shownCommand = make("pre", { id: "curl", tabIndex: 0, textContent: command });
  copy.addEventListener("click", () => {
    // Over plain HTTP, as here, browsers have no navigator.clipboard.
    getSelection().selectAllChildren(shownCommand);
    document.execCommand("copy");
  });
  return [make("h3", {}, "One request ", copy), shownCommand];
}

export function beginPanel() {
  const close = () => {
    $("panel").hidden = true;
    shown?.element?.querySelector("button").focus();
    shown = null;
  };
  $("close").addEventListener("click", close);
  $("panel").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
}

function action(what, row, log) {
  const button = make("button", { type: "button", textContent: what });
  button.addEventListener("click", async () => {
    const token = sessionStorage.getItem("token") ?? prompt("token") ?? "";
    let said;
    try {
      const answer = await fetch("live/steer", {
        method: "POST",
        headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
        body: JSON.stringify({ server: row.server, model: row.name, what }),
      });
      if (answer.status === 401) sessionStorage.removeItem("token");
      else sessionStorage.setItem("token", token);
      said = answer.ok ? "done" : await answer.text();
    } catch (error) {
      said = String(error); // there is no connection, or no header can have this token
    }
    const server = servers.get(row.server);
    log({ t: server ? now(server) : Date.now() / 1000, server: row.server, text: `${what} ${row.name}: ${said}` });
  });
  return button;
}
