// A model's panel: its figures, what happened to it, and actions for clients with the token.
import { $, bytes, make, say } from "./base.js";
import { servers } from "./servers.js";

let shown = null;

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
  shown = row.key;
  $("panel").hidden = false;
  say($("panel-title"), row.name);
  $("panel").focus();
  $("actions").replaceChildren(...(writable && row.state !== "cold" ? ["pin", "unpin", "prefetch", "evict"].map((what) => action(what, row, log)) : []));
  $("panel-parts").replaceChildren(make("p", { textContent: `${row.weights}; weights: ${weights(row)}${row.error ? `; ${row.error}` : ""}` }));
  const query = new URLSearchParams({ server: row.server, model: row.name });
  let lines;
  try {
    const answer = await fetch(`live/history?${query}`);
    lines = answer.ok ? await answer.json() : [await answer.text()];
  } catch (error) {
    lines = [String(error)];
  }
  if (shown === row.key) $("history-lines").replaceChildren(...lines.reverse().map((text) => make("li", { textContent: text })));
}

export function beginPanel() {
  const close = () => {
    $("panel").hidden = true;
    document.querySelector(`tr[data-model="${CSS.escape(shown?.slice(shown.indexOf("/") + 1) ?? "")}"] button`)?.focus();
    shown = null;
  };
  $("close").addEventListener("click", close);
  $("panel").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
}

function action(what, row, log) {
  const button = make("button", { type: "button", textContent: what });
  button.addEventListener("click", async () => {
    const token = sessionStorage.getItem("token") ?? prompt("token") ?? "";
    const answer = await fetch("live/steer", {
      method: "POST",
      headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
      body: JSON.stringify({ server: row.server, model: row.name, what }),
    });
    if (answer.status === 401) sessionStorage.removeItem("token");
    else sessionStorage.setItem("token", token);
    log({ t: Date.now() / 1000, server: row.server, text: answer.ok ? `${what} ${row.name}: done` : `${what} ${row.name}: ${await answer.text()}` });
  });
  return button;
}
